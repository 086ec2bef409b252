"""Prepare this checkout's Python environment outside the checkout and print the path of its python.

Standard library only: this is what `make` runs before anything is installed. Everything but that path goes to
stderr. There are two kinds of environments, both named after their contents:

- `env-KEY` holds all dependencies, 11 GB, and not the project. Checkouts with equal dependencies share it.
- `checkout-KEY` holds one checkout's project and nothing else. Its python also imports what the shared one has, and its
  `bin` has the shared one's commands, so checkouts that are used at once each run their own code.
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
# Written last, so that an interrupted install is recognised by its absence. In an environment of a checkout it holds
# what that was made of.
MARKER = "environment-complete"
# Its time of change is when `make` last asked for the environment.
LAST_USED = "last-used"


def fail(sentence: str) -> NoReturn:
    """Exits the program with one sentence for the user."""
    raise SystemExit(f"error: {sentence}")


def cache_root() -> Path:
    """Where everything that is prepared once is kept: environments, model, logs."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base).absolute() / "sglang-triattn"


def refuse_old_python() -> None:
    """Exits with one sentence where this file cannot do its work."""
    if sys.version_info < MINIMUM_PYTHON:
        found, wanted = ("{}.{}".format(*version[:2]) for version in (sys.version_info, MINIMUM_PYTHON))
        fail(f"Python {wanted} or newer is needed, this is {found}: run `make PYTHON=/path/to/python{wanted}`.")


def _project(root: Path) -> dict:
    """The table `project` of a checkout's pyproject.toml."""
    import tomllib

    return tomllib.loads((root / "pyproject.toml").read_text())["project"]


def environment_key(root: Path, python_version: tuple[int, int]) -> str:
    """Twelve hex digits that change when the pins, the dependencies or the Python minor version change."""
    project = _project(root)
    extras = project["optional-dependencies"]
    plot = extras.get("plot", [])
    # A requirement that moves between `dependencies` and the extra `plot` is installed either way: the key is that of
    # one list of both, pins first.
    tables = {
        "dependencies": sorted([*project["dependencies"], *plot], key=lambda need: ("==" not in need, need)),
        "optional-dependencies": {"dev": [need for need in extras["dev"] if need not in plot]},
    }
    parts = [
        (root / "constraints.txt").read_bytes(),
        json.dumps(tables, sort_keys=True).encode(),
        "{}.{}".format(*python_version).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def shared_directory(root: Path) -> Path:
    """Where the dependencies of a checkout are, or will be."""
    return cache_root() / f"env-{environment_key(root, sys.version_info[:2])}"


def checkout_stamp(root: Path, shared: Path) -> str:
    """JSON of all that an environment of a checkout is made of: paths, and digests of what its metadata come from."""
    sources = (root / "pyproject.toml", root / "sglang_triattn" / "__init__.py", Path(__file__))
    contents = b"\0".join(path.read_bytes() for path in sources)
    stamp = {
        "checkout": str(root),
        "shared": str(shared),
        # Changes when an environment is removed and installed again.
        "shared_installed_ns": (shared / MARKER).stat().st_mtime_ns,
        "sources": hashlib.sha256(contents).hexdigest(),
    }
    return json.dumps(stamp)


def checkout_directory(stamp: str) -> Path:
    """Where the environment with this stamp is, or will be.

    Other metadata give another directory, so what runs from the old one keeps it.
    """
    return cache_root() / f"checkout-{hashlib.sha256(stamp.encode()).hexdigest()[:12]}"


@contextmanager
def exclusive_lock(path: Path, wait: bool = True):
    """Holds the lock file; reports when it has to wait for another process.

    Raises:
        BlockingIOError: another process holds it, and `wait` is false.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not wait:
                    raise
                print(f"waiting for another process that holds {path}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            # Its last holder may have removed the file, and a third process may hold a new one.
            if _is_at(path, file):
                yield file
                return


def _is_at(path: Path, file) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _run(command: list, lock, failure: str) -> None:
    # The child inherits the lock, so that a pip that outlives a killed `make` still blocks the next one.
    result = subprocess.run(list(map(str, command)), cwd="/", stdout=sys.stderr, pass_fds=[lock.fileno()])
    if result.returncode != 0:
        fail(failure)


def _make_venv(directory: Path, python: str | Path, lock, *options: str) -> None:
    _run(
        [python, "-m", "venv", *options, directory],
        lock,
        "`python3 -m venv` failed (its messages are above): install Python's venv module, or set PYTHON=.",
    )


def site_packages(directory: Path) -> Path:
    """The folder of an environment that its packages are in."""
    (found,) = directory.glob("lib/python*/site-packages")
    return found


def _install_dependencies(directory: Path, root: Path, lock) -> None:
    free = shutil.disk_usage(directory.parent).free
    if free < DISK_BYTES_NEEDED:
        needed, free = DISK_BYTES_NEEDED / 1e9, free / 1e9
        fail(
            f"the environment needs about {needed:.0f} GB in {directory.parent} and {free:.0f} GB are free: "
            "free some, or set XDG_CACHE_HOME to a larger disk."
        )
    print(f"preparing {directory}: once, some minutes and 11 GB", file=sys.stderr)
    others = sum(path.is_dir() and path != directory for path in directory.parent.glob("env-*"))
    if others:
        print(f"other environments are there: {others}; `make clean-envs` removes unused ones", file=sys.stderr)
    _make_venv(directory, sys.executable, lock)
    project = _project(root)
    # setuptools is named because checkouts are installed without build isolation.
    needs = ["setuptools", *project["dependencies"], *project["optional-dependencies"]["dev"]]
    _run(
        [directory / "bin" / "python", "-m", "pip", "install", "-c", root / "constraints.txt", *needs],
        lock,
        "the installation failed (pip's messages are above): correct that and run make again.",
    )


def _remove_project(directory: Path, lock) -> None:
    """Takes an editable install of some checkout out of a shared environment.

    Who uses the shared environment by itself must not get the code of a checkout that somebody else works in.
    """
    if not any(site_packages(directory).glob("sglang_triattn-*.dist-info")):
        return
    print(f"removing an editable install from {directory}, which several checkouts share", file=sys.stderr)
    # A checkout that installs itself there, as earlier commits do, takes this file for a sign that it already has.
    (directory / "checkout.json").unlink(missing_ok=True)
    _run(
        [directory / "bin" / "python", "-m", "pip", "uninstall", "-q", "-y", "sglang-triattn"],
        lock,
        f"pip could not remove sglang-triattn from {directory} (its messages are above).",
    )


def _install_checkout(directory: Path, root: Path, shared: Path, lock) -> None:
    _make_venv(directory, shared / "bin" / "python", lock, "--without-pip")
    # The prefix makes site.getsitepackages() name the shared packages too: cuda.pathfinder looks there for libraries.
    line = f"import site; site.PREFIXES.append({str(shared)!r}); site.addsitedir({str(site_packages(shared))!r})\n"
    (site_packages(directory) / "shared.pth").write_text(line)
    options = ["-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation"]
    _run(
        [directory / "bin" / "python", "-m", "pip", "install", *options, "-e", root],
        lock,
        f"pip could not install {root} (its messages are above).",
    )
    _copy_commands(shared / "bin", directory / "bin")


def _copy_commands(source: Path, target: Path) -> None:
    """Puts the commands of one environment into another one, whose python then runs those in Python."""
    for command in source.iterdir():
        copy = target / command.name
        if copy.exists() or not command.is_file():
            continue
        with command.open("rb") as file:
            head, second = file.readline(256), file.readline(256)
            # Where a path is too long for a first line, pip lets a shell start Python, in what is text to Python.
            if head.startswith(b"#!") and (b"python" in head or second.startswith(b"'''exec'")):
                copy.write_bytes(f"#!{target / 'python'}\n".encode() + second + file.read())
                shutil.copymode(command, copy)
            else:
                copy.symlink_to(command)


def _complete(directory: Path) -> bool:
    """Whether all is installed; removes what is not."""
    # exists() follows links: the Python that an environment was made with may have been removed since.
    if (directory / MARKER).exists() and (directory / "bin" / "python").exists():
        return True
    # Environments cannot be renamed once built, so an unfinished one is removed rather than built elsewhere.
    if directory.exists():
        shutil.rmtree(directory)
    return False


def prepare(root: Path = ROOT) -> Path:
    """Returns the python of a complete environment with `root` installed; builds what is missing."""
    shared = shared_directory(root)
    with exclusive_lock(shared.with_suffix(".lock")) as lock:
        if not _complete(shared):
            _install_dependencies(shared, root, lock)
            (shared / MARKER).touch()
            print(f"environment ready: {shared}", file=sys.stderr)
        _remove_project(shared, lock)
        (shared / LAST_USED).touch()
        stamp = checkout_stamp(root, shared)
    own = checkout_directory(stamp)
    with exclusive_lock(own.with_suffix(".lock")) as lock:
        if not _complete(own):
            _install_checkout(own, root, shared, lock)
            (own / MARKER).write_text(stamp)
        (own / LAST_USED).touch()
    return own / "bin" / "python"


def main() -> None:
    refuse_old_python()
    try:
        print(prepare())
    except KeyboardInterrupt:
        fail("interrupted; run make again, it starts over.")


if __name__ == "__main__":
    main()
