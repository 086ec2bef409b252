"""Runs kernel tests in a process with Triton's interpreter, so that they also run on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from checkout import ROOT

# These run in parallel with all others; the tests of one file stay in one process.
SELECTION = ("tests/gpu/test_select_kernel.py", "tests/gpu/test_scorer.py")


def assert_pass_interpreted(*arguments: str) -> None:
    """Runs pytest with these arguments in a new process.

    A kernel is bound to the interpreter or the compiler when its module is first imported.
    """
    path = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", "-p", "quick_interpreter", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
