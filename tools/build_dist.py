"""Build the sdist and the wheel of the last commit into dist/, and check them.

Nothing that is not committed gets into them. Timestamps are the commit's, so that a commit always gives the same wheel.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

from packaging.metadata import Metadata

from checkout import ROOT
from env import fail

PACKAGE = "sglang_triattn"
# Sub-packages that are links to folders next to it.
LINKED = ("kernels", "patches")


def version_of(source: Path) -> str:
    """The version that the package in a checkout has."""
    text = (source / PACKAGE / "__init__.py").read_text()
    return re.findall(r'^__version__ = "(.*)"$', text, re.MULTILINE)[0]


def package_files(source: Path) -> dict[str, bytes]:
    """Content of each file of the package in a checkout, by its path in a wheel."""

    def walk(folder: Path, prefix: str) -> Iterator[tuple[str, bytes]]:
        for path in folder.rglob("*"):
            # Links to folders are not followed.
            if path.is_file() and "__pycache__" not in path.parts:
                yield prefix + path.relative_to(source).as_posix(), path.read_bytes()

    found = dict(walk(source / PACKAGE, ""))
    for name in LINKED:
        found |= walk(source / name, f"{PACKAGE}/")
    return found


def build(source: Path, out: Path, epoch: int) -> tuple[Path, Path]:
    """Builds the sdist of a checkout, and the wheel from that sdist; returns both.

    Args:
        epoch: time of every file in the wheel, in seconds since 1970.
    """
    out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    env = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, cwd=out, env=env, capture_output=True, text=True)
    if done.returncode != 0:
        print(done.stdout, done.stderr, sep="\n", file=sys.stderr)
        fail("the build failed (its messages are above).")
    name = f"{PACKAGE}-{version_of(source)}"
    return out / f"{name}.tar.gz", out / f"{name}-py3-none-any.whl"


def check(sdist: Path, wheel: Path, source: Path) -> None:
    """Fails unless both hold what the checkout does, and metadata that an index accepts."""
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    info = f"{PACKAGE}-{version_of(source)}.dist-info"
    own = {name: content for name, content in files.items() if not name.startswith(f"{info}/")}
    wanted = package_files(source)
    if own != wanted:
        different = sorted(name for name in own | wanted if own.get(name) != wanted.get(name))
        fail(f"{different[0]} in {wheel.name} is not as in the checkout.")
    if files.get(f"{info}/licenses/LICENSE") != (source / "LICENSE").read_bytes():
        fail(f"{wheel.name} holds no LICENSE, or another one.")
    with tarfile.open(sdist) as archive:
        top = f"{PACKAGE}-{version_of(source)}/"
        streams = {member.name.removeprefix(top): archive.extractfile(member) for member in archive}
        packed = {name: stream.read() for name, stream in streams.items() if stream is not None}
    for part in ("tests/", "benchmarks/", "tools/", "docs/"):
        if any(name.startswith(part) for name in packed):
            fail(f"{sdist.name} holds {part}, which is for a checkout.")
    about = packed["PKG-INFO"]
    if about != files[f"{info}/METADATA"]:
        fail(f"{sdist.name} and {wheel.name} describe themselves differently.")
    check_metadata(about, source)


def check_metadata(about: bytes, source: Path) -> None:
    """Fails unless an index accepts the metadata, and they are those of the checkout."""
    try:
        metadata = Metadata.from_email(about, validate=True)
    except ExceptionGroup as group:
        fail(f"an index would refuse the metadata: {group.exceptions[0]}.")
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    needs = {str(need) for need in metadata.requires_dist or () if need.marker is None}
    found = (metadata.name, str(metadata.version), needs, (metadata.description or "").strip())
    wanted = (
        project["name"],
        version_of(source),
        set(project["dependencies"]),
        (source / "README.md").read_text().strip(),
    )
    for what, one, other in zip(("name", "version", "dependencies", "description"), found, wanted, strict=True):
        if one != other:
            fail(f"the metadata's {what} is not the checkout's.")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, allow_abbrev=False).parse_args()
    git = ["git", "-C", str(ROOT)]
    if subprocess.run([*git, "status", "--porcelain"], check=True, capture_output=True).stdout:
        print("what is not committed is left out", file=sys.stderr)
    epoch = int(subprocess.run([*git, "log", "-1", "--format=%ct"], check=True, capture_output=True).stdout)
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder:
        archive = [*git, "-c", "tar.umask=0022", "archive", "HEAD"]
        with subprocess.Popen(archive, stdout=subprocess.PIPE) as packed:
            subprocess.run(["tar", "-x", "-C", folder], stdin=packed.stdout, check=True)
        built = build(Path(folder), ROOT / "dist", epoch)
        check(*built, Path(folder))
    for path in built:
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
