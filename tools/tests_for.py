"""Which tests a change can break: the files of tests that import, serve or read what changed, and why.

python tools/tests_for.py [FILE ...]         of these files or folders; else of what differs from the last commit
python tools/tests_for.py --base REVISION    of what differs from this revision, commits included

Prints one file of tests a line, a tab, and the reason. Exits with 2 if no test is found for a changed Python file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from checkout import ROOT
from env import fail
from import_graph import FOLDERS, PRODUCT, Checkout
from server_tests import FOLDER, server_tests

LAYOUT = "tests/unit/tools/test_layout.py"
"""Reads every Python file."""
# Where there is none, pytest collects nothing of tests/gpu, and the tests that run them interpreted are chosen too.
NVIDIA = Path("/proc/driver/nvidia")


class Unmapped(Exception):
    """No test is found for this Python file."""


def changed_files(root: Path, base: str) -> list[str]:
    """Files that differ from the revision `base`, with new and deleted ones, relative to the root."""
    listed = []
    for command in (
        ["diff", "--name-only", "--no-renames", "-z", base, "--"],
        ["ls-files", "--others", "--exclude-standard", "-z"],
    ):
        done = subprocess.run(["git", *command], cwd=root, capture_output=True, text=True)
        if done.returncode:
            fail(f"git {command[0]} {base} failed: {done.stderr.strip()}")
        listed += done.stdout.split("\0")
    return sorted({file for file in listed if file})


def given_files(root: Path, words: Iterable[str]) -> list[str]:
    """The files that a user names, and those in the folders named, relative to the root."""
    found: set[str] = set()
    for word in words:
        path = Path(word).resolve()
        if not path.is_relative_to(root) or not path.exists():
            fail(f"{word} is no file of this checkout: name files or folders in {root.name}, or none.")
        inside = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
        found |= {str(each.relative_to(root)) for each in inside if "__pycache__" not in each.parts}
    return sorted(found)


def tests_that_need(checkout: Checkout, file: str) -> dict[str, str]:
    """Tests that need a Python file, and why; tests on servers only if the file is no part of the product."""
    found = {}
    for test in checkout.tests:
        reached = checkout.reached(test)
        if file not in reached or (test.startswith(FOLDER) and file.partition("/")[0] in PRODUCT):
            continue
        by = reached[file]
        found[test] = "changed" if not by else f"needs {file}" if by == test else f"needs {file}, through {by}"
    return found


def tests_that_read(checkout: Checkout, file: str) -> dict[str, str]:
    """Tests that name a file which is not Python's, or its folder: themselves or in what they need.

    Documents, settings and recorded figures are read by unit tests; a test on a server only if it names the file.
    """
    path = Path(file)
    # A file at the root has no folder that anything would name for its sake.
    folders = {str(path.parent), path.parent.name if path.parts[0] in ("tests", "benchmarks") else path.parts[0]}
    places = {file} if path.parent == Path() else {file, *folders}
    places |= {path.name} if "." in path.name else set()
    constants = {path.stem} if path.stem.isupper() else set()
    sources = {
        each
        for each, source in checkout.sources.items()
        if ({path.name, file} if each.partition("/")[0] in PRODUCT else places) & source.strings
    }
    found = {}
    for test in checkout.tests:
        source = checkout.sources[test]
        itself = bool({path.name} & source.strings or constants & source.names)
        if itself or (not test.startswith(FOLDER) and sources & set(checkout.reached(test))):
            found[test] = f"reads {file}"
    if path.parts[0] in ("tests", "sglang_triattn"):
        return found
    return {test: why for test, why in found.items() if test.startswith(("tests/unit/", FOLDER))}


def type_checked_alone(checkout: Checkout, file: str) -> bool:
    """Whether nothing imports this file when it runs, but a type checker does."""
    names = [name for name, each in checkout.modules.items() if each == file]
    return any(name in source.types_alone for name in names for source in checkout.sources.values())


def tests_for(checkout: Checkout, file: str) -> dict[str, str]:
    """Files of tests that a change of one file can break, and why.

    Raises:
        Unmapped: it is a Python file, and there are none.
    """
    path = Path(file)
    if path.name == "conftest.py":
        found = {test: f"is below {file}" for test in checkout.tests if path.parent in Path(test).parents}
    elif file not in checkout.files:
        return tests_that_read(checkout, file)
    else:
        found = tests_that_need(checkout, file)
        if file in checkout.product:
            found |= server_tests(checkout, file)
    if not found and not type_checked_alone(checkout, file):
        raise Unmapped(file)
    return {LAYOUT: f"reads {file}"} | found


def select(root: Path, files: Sequence[str]) -> dict[str, str]:
    """Files of tests, in order, and why each is chosen, for all changed files together.

    Raises:
        Unmapped: no test is found for one of them.
    """
    deleted = [file for file in files if file.endswith(".py") and not (root / file).exists()]
    checkout = Checkout(root, [file for file in deleted if file.partition("/")[0] in FOLDERS])
    found: dict[str, str] = {}
    for file in files:
        for test, why in tests_for(checkout, file).items():
            if test not in deleted:
                found.setdefault(test, why)
    return dict(sorted(found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tests that a change can break.", allow_abbrev=False)
    parser.add_argument("files", nargs="*", metavar="FILE", help="what changed; else what differs from --base")
    parser.add_argument("--base", default="HEAD", metavar="REVISION", help="compared with this revision (%(default)s)")
    arguments = parser.parse_args()
    files = given_files(ROOT, arguments.files) if arguments.files else changed_files(ROOT, arguments.base)
    try:
        found = select(ROOT, files)
    except Unmapped as unmapped:
        print(f"error: no test is found for {unmapped}: add it to tools/server_tests.py or write one.", file=sys.stderr)
        raise SystemExit(2) from None
    if not NVIDIA.exists():
        found = {test: why for test, why in found.items() if not test.startswith("tests/gpu/")}
    for test, why in found.items():
        print(f"{test}\t{why}")
    print(f"{len(files)} changed files, {len(found)} files of tests", file=sys.stderr)


if __name__ == "__main__":
    main()
