"""Runs kernel tests in a process with Triton's interpreter, so that they also run on machines without a GPU.

What passed is remembered under $XDG_CACHE_HOME/sglang-triattn/interpreted, by all that decides what the tests do, as
`tools/compile_kernels.py` keeps the figures of what it compiled: the interpreter takes minutes, and its kernels draw
their numbers from fixed seeds. Remove that folder to run everything again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path

from checkout import ROOT
from env import cache_root
from import_graph import Checkout

# These run in parallel with all others; the tests of one file stay in one process.
SELECTION = ("tests/gpu/test_select_kernel.py", "tests/gpu/test_scorer.py")
# Where the kernels' numbers come from, but for this checkout.
PACKAGES = ("numpy", "pytest", "sglang", "torch", "transformers", "triton")
# Read by path, not imported.
DATA = ("pyproject.toml", "tests/golden", "tests/support/configs", "tests/support/unit/quick_interpreter.py")


def assert_pass_interpreted(*arguments: str) -> None:
    """Runs pytest with these arguments in a new process, unless they passed before.

    A kernel is bound to the interpreter or the compiler when its module is first imported.
    """
    passed = cache_root() / "interpreted" / key_of(ROOT, arguments)
    if passed.exists():
        return
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "quick_interpreter", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    passed.parent.mkdir(parents=True, exist_ok=True)
    passed.write_text(done.stdout.splitlines()[-1] + "\n")


def key_of(root: Path, arguments: Sequence[str]) -> str:
    """Differs wherever pytest with these arguments might do anything else in the checkout at `root`."""
    named = [word for word in arguments if (root / word).exists()]
    files = {each: hashlib.sha256((root / each).read_bytes()).hexdigest() for each in inputs_of(root, named)}
    machine = [platform.machine(), platform.python_version(), *map(version, PACKAGES)]
    return hashlib.sha256(json.dumps([arguments, files, machine], sort_keys=True).encode()).hexdigest()[:32]


def inputs_of(root: Path, named: Sequence[str]) -> list[str]:
    """The tests' files and folders `named`, the conftest.py files that pytest loads for them, all that these import or
    name, and the data that tests read."""
    checkout = _checkout(root)
    tests = [file for file in checkout.files if any(Path(file).is_relative_to(name) for name in named)]
    above = {str(folder / "conftest.py") for test in tests for folder in Path(test).parents}
    found = {each for file in (*tests, *above.intersection(checkout.files)) for each in checkout.reached(file)}
    for place in map(root.joinpath, DATA):
        inside = place.rglob("*") if place.is_dir() else [place]
        found |= {str(path.relative_to(root)) for path in inside if path.is_file() and "__pycache__" not in path.parts}
    return sorted(found)


@cache
def _checkout(root: Path) -> Checkout:
    return Checkout(root)
