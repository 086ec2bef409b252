"""Runs kernel tests in a process with Triton's interpreter, so that they also run on machines without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

from checkout import ROOT

# These run in parallel with all others; the tests of one file stay in one process.
SELECTION = ("tests/gpu/test_select_kernel.py", "tests/gpu/test_scorer.py")


def assert_pass_interpreted(*arguments: str) -> None:
    """Runs pytest with these arguments in a new process.

    A kernel is bound to the interpreter or the compiler when its module is first imported.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
