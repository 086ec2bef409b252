"""Prepare the project's Python environment outside the checkout and print the path of its python.

Standard library only: this is what `make` runs before anything is installed. Everything but that path goes to
stderr. Environments are named after their contents, so checkouts with equal dependencies share one.
"""

# Lets an older Python get as far as the message that says it is too old.
from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
MINIMUM_PYTHON = (3, 11)
DISK_BYTES_NEEDED = 14 * 10**9
# Written last, so that an interrupted install is recognised by its absence.
MARKER = "environment-complete"
# Which checkout the editable install points at.
CHECKOUT_STAMP = "checkout.json"


def fail(sentence: str) -> NoReturn:
    """Exits the program with one sentence for the user."""
    raise SystemExit(f"error: {sentence}")


def cache_root() -> Path:
    """Where everything that is prepared once is kept: environments, model, logs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "sglang-triattn"


def environment_key(root: Path, python_version: tuple[int, int]) -> str:
    """Twelve hex digits that change when the pins, the dependencies or the Python minor version change."""
    import tomllib

    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    tables = {name: project.get(name) for name in ("dependencies", "optional-dependencies")}
    parts = [
        (root / "constraints.txt").read_bytes(),
        json.dumps(tables, sort_keys=True).encode(),
        "{}.{}".format(*python_version).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def checkout_stamp(root: Path) -> str:
    """Identifies an editable install: the checkout, and the file that defines its entry points."""
    pyproject = hashlib.sha256((root / "pyproject.toml").read_bytes()).hexdigest()
    return json.dumps({"checkout": str(root), "pyproject": pyproject})


@contextmanager
def exclusive_lock(path: Path):
    """Holds the lock file; reports when it has to wait for another process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that holds {path}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file


def _run(command: list, lock, failure: str) -> None:
    # The child inherits the lock, so that a pip that outlives a killed `make` still blocks the next one.
    result = subprocess.run(list(map(str, command)), cwd="/", stdout=sys.stderr, pass_fds=[lock.fileno()])
    if result.returncode != 0:
        fail(failure)


def _install(directory: Path, root: Path, lock) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < DISK_BYTES_NEEDED:
        needed, free = DISK_BYTES_NEEDED / 1e9, free / 1e9
        fail(
            f"the environment needs about {needed:.0f} GB in {directory.parent} and {free:.0f} GB are free: "
            "free some, or set XDG_CACHE_HOME to a larger disk."
        )
    print(f"preparing {directory}: once, some minutes and 11 GB", file=sys.stderr)
    python = directory / "bin" / "python"
    _run(
        [sys.executable, "-m", "venv", directory],
        lock,
        "`python3 -m venv` failed (its messages are above): install Python's venv module, or set PYTHON=.",
    )
    pip = [python, "-m", "pip", "install", "-c", root / "constraints.txt"]
    # setuptools is named because the later editable installs build without isolation.
    _run(
        [*pip, "setuptools", "-e", f"{root}[dev]"],
        lock,
        "the installation failed (pip's messages are above): correct that and run make again.",
    )


def prepare(root: Path = ROOT) -> Path:
    """Returns the python of a complete environment with `root` installed; builds what is missing."""
    directory = cache_root() / f"env-{environment_key(root, sys.version_info[:2])}"
    python, marker, stamp = directory / "bin" / "python", directory / MARKER, directory / CHECKOUT_STAMP
    with exclusive_lock(directory.with_suffix(".lock")) as lock:
        if not (marker.exists() and python.exists()):
            # Environments cannot be renamed once built, so an unfinished one is removed rather than built elsewhere.
            if directory.exists():
                shutil.rmtree(directory)
            _install(directory, root, lock)
            stamp.write_text(checkout_stamp(root))
            marker.touch()
            print(f"environment ready: {directory}", file=sys.stderr)
        elif not stamp.exists() or stamp.read_text() != checkout_stamp(root):
            stamp.unlink(missing_ok=True)
            _run(
                [python, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "-e", root],
                lock,
                f"pip could not install {root} (its messages are above).",
            )
            stamp.write_text(checkout_stamp(root))
    return python


def main() -> None:
    if sys.version_info < MINIMUM_PYTHON:
        found, wanted = ("{}.{}".format(*version[:2]) for version in (sys.version_info, MINIMUM_PYTHON))
        fail(f"Python {wanted} or newer is needed, this is {found}: run `make PYTHON=/path/to/python{wanted}`.")
    try:
        print(prepare())
    except KeyboardInterrupt:
        fail("interrupted; run make again, it starts over.")


if __name__ == "__main__":
    main()
