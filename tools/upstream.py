"""Say what in the newest SGLang does not fit this package: `sglang-triattn doctor` with that SGLang.

    python tools/upstream.py [--version VERSION]

If the newest on the registry is the version that this package is for, says so and installs nothing. Otherwise that
SGLang alone, without what it depends on, is installed into its own folder next to the environments, which comes
first on the path of the pinned environment; that one is not touched. Exits with the status of `doctor`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from env import cache_root, exclusive_lock, fail
from sglang_triattn.patches.hooks.hook import SGLANG_VERSION

DOCTOR = "import sys; from sglang_triattn.cli.main import main; sys.exit(main(['doctor', '--json']))"
# Written last: without it, an installation was interrupted.
MARKER = "complete"


def newest() -> str:
    """The newest released SGLang on pip's registry."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = re.match(r"sglang \(([^)]+)\)", done.stdout)
    if done.returncode or found is None:
        fail(f"pip found no SGLang on its registry ({(done.stderr.strip().splitlines() or ['no answer'])[-1]}).")
    assert found is not None
    return found[1]


def folder_of(version: str) -> Path:
    """Where SGLang of this version is put, for this Python."""
    return cache_root() / f"upstream-sglang-{version}-py{sys.version_info[0]}.{sys.version_info[1]}"


def install(version: str) -> Path:
    """The folder that holds SGLang of this version; installed if need be."""
    folder = folder_of(version)
    with exclusive_lock(folder.with_name(f"{folder.name}.lock")):
        if not (folder / MARKER).exists():
            if folder.exists():
                shutil.rmtree(folder)
            print(f"installing sglang {version} alone into {folder}", file=sys.stderr)
            command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
            done = subprocess.run([*map(str, command), f"sglang=={version}"], cwd="/", stdout=sys.stderr)
            if done.returncode:
                fail(f"pip could not install sglang=={version} (its messages are above): give a version that it knows.")
            (folder / MARKER).touch()
    return folder


def examine(folder: Path) -> tuple[int, list[dict[str, str]]]:
    """Exit status and rows of `doctor` where the SGLang in `folder` comes first on the path."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-c", DOCTOR]
    done = subprocess.run(
        command, cwd="/", env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True, timeout=1800
    )
    try:
        return done.returncode, json.loads(done.stdout)["rows"]
    except ValueError:
        fail(f"doctor ended with status {done.returncode} and without an answer (its messages are above).")
        raise


def report(version: str, rows: list[dict[str, str]]) -> str:
    """What would break, and how much was looked at."""
    faults = [row for row in rows if "consequence" in row]
    lines = [f"sglang-triattn for sglang {SGLANG_VERSION}, with sglang {version}:"]
    for row in faults:
        lines += [
            "",
            f"{row['status']:<8} {row['name']}",
            f"         {row['found']}",
            f"         → {row['consequence']}",
        ]
    return "\n".join([*lines, "", f"{len(rows)} rows, {len(faults)} fault{'s' * (len(faults) != 1)}"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Say what in another SGLang does not fit this package.")
    parser.add_argument("--version", help="of SGLang (the newest on the registry)")
    version = parser.parse_args().version or newest()
    if version == SGLANG_VERSION:
        print(f"sglang {version} is the version that this package is for: nothing to compare, nothing installed")
        return 0
    status, rows = examine(install(version))
    print(report(version, rows))
    return status


if __name__ == "__main__":
    sys.exit(main())
