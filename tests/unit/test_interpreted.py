"""Runs the kernels under Triton's interpreter, so that they are tested on machines without a GPU too."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "path", ["tests/gpu", "tests/property/rounds_by_kernels.py", "tests/property/backend_metadata.py"]
)
def test_kernels_under_the_interpreter(path):
    """Prevents kernels from drifting from their twins, and from the rounds that use them, where no GPU is at hand.

    A process of its own: a kernel is bound to the interpreter or the compiler when its module is first imported.
    """
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-x", path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
