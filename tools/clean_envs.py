"""Remove prepared environments that nothing uses, and print what was removed and how many GB that gave back.

Under $XDG_CACHE_HOME/sglang-triattn: environments that `make` has not asked for in 30 days, interrupted installs, the
environments of checkouts that are gone, and what is left of their locks. Kept are those of this checkout, and those
that a process runs from or installs into. Standard library only: it prepares no environment to run in.
"""

# Lets an older Python get as far as the message that says it is too old.
from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import env

MAX_AGE_DAYS = 30
# Directories of environments and, with a suffix, their lock files. Nothing else in the cache has such a name.
NAME = re.compile(r"(?:env|checkout)-[0-9a-f]{12}")
# What shows where a process runs from: its libraries, its command, and the PATH that it was found on.
PROCESS_FILES = ("maps", "cmdline", "environ")


def names_in_use() -> set[str]:
    """Names of the environments of this checkout, and of those that a running process mentions."""
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        for name in PROCESS_FILES:
            try:
                text = (process / name).read_text(errors="replace")
            except OSError:
                # It has ended, or is another user's.
                continue
            names.update(NAME.findall(text))
    shared = env.shared_directory(env.ROOT)
    names.add(shared.name)
    if (shared / env.MARKER).exists():
        names.add(env.checkout_directory(env.checkout_stamp(env.ROOT, shared)).name)
    return names


def last_used(directory: Path) -> float:
    """When the environment was last asked for, in seconds since 1970.

    Its python reads pyvenv.cfg at each start, also where it is started without `make`. File systems may record reading
    once a day, or never.
    """
    times = [(directory / "pyvenv.cfg").stat().st_atime, (directory / env.MARKER).stat().st_mtime]
    if (directory / env.LAST_USED).exists():
        times.append((directory / env.LAST_USED).stat().st_mtime)
    return max(times)


def why_remove(directory: Path, used: set[str]) -> str | None:
    """Why nothing needs the environment; None if something may."""
    if not (directory / env.MARKER).exists() or not (directory / "pyvenv.cfg").exists():
        return "its installation was interrupted"
    if directory.name in used:
        return None
    if directory.name.startswith("checkout-"):
        stamp = json.loads((directory / env.MARKER).read_text())
        if not (Path(stamp["checkout"]) / "pyproject.toml").exists():
            return f"{stamp['checkout']} is gone"
        if not (Path(stamp["shared"]) / env.MARKER).exists():
            return "the environment that it needs is gone"
    days = (time.time() - last_used(directory)) / 86400
    return f"not used for {days:.0f} days" if days > MAX_AGE_DAYS else None


def size(directory: Path) -> int:
    """Bytes of disk that its files take up."""
    return sum(path.lstat().st_blocks * 512 for path in directory.rglob("*"))


def clean() -> tuple[int, int]:
    """Removes what nothing needs and prints a line for each; returns how many environments and bytes that were."""
    root, used = env.cache_root(), names_in_use()
    number = freed = 0
    found = {path.stem for path in root.glob("*-*") if NAME.fullmatch(path.stem)}
    # Shared environments first, because those of checkouts are of no use without theirs.
    for name in sorted(found, reverse=True):
        directory, lock = root / name, root / f"{name}.lock"
        try:
            with env.exclusive_lock(lock, wait=False):
                if not directory.is_dir():
                    lock.unlink()
                elif why := why_remove(directory, used):
                    removed = size(directory)
                    # First, so that what is left by an interruption is no environment.
                    (directory / env.MARKER).unlink(missing_ok=True)
                    shutil.rmtree(directory)
                    lock.unlink()
                    print(f"removed {directory}, {removed / 1e9:.1f} GB: {why}")
                    number, freed = number + 1, freed + removed
        except BlockingIOError:
            print(f"kept {directory}: another process installs into it")
    return number, freed


def main() -> None:
    env.refuse_old_python()
    number, freed = clean()
    print(f"{number} environments removed, {freed / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
