"""What `make kernels` would let through; it compiles every kernel for every GPU generation served."""

import os
import re
import subprocess
import sys

import pytest

from checkout import ROOT

pytest.importorskip("triton", reason="Triton has no wheel for this platform")
TOOL = ROOT / "tools" / "compile_kernels.py"

# Combinations that no launch asks for: four warps with so few registers spill, and 33 frequencies are no power of two.
UNFIT = """
import sys
import compile_kernels
name, settings = next(c for c in compile_kernels.combinations(90) if c[0] == "score_kernel" and not c[1]["TILED"])
compile_kernels.ARCHITECTURES = (90,)
unfit = [settings, settings | {"maxnreg": 40}, settings | {"FT": 33}]
compile_kernels.combinations = lambda architecture: [(name, each) for each in unfit]
sys.exit(compile_kernels.main())
"""


def run(command: list, **environment: str) -> subprocess.CompletedProcess:
    """Runs in a new process, because the interpreter may be on in this one."""
    path = [str(TOOL.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path))} | environment
    return subprocess.run(
        [sys.executable, "-P", *command], env=environment, capture_output=True, text=True, timeout=800
    )


def test_unfit_kernels_are_reported(tmp_path):
    """Prevents a check that always passes, and a kept result that hides what the check found."""
    for compiled in (3, 1):  # The one that does not compile is tried again.
        done = run(["-c", UNFIT], XDG_CACHE_HOME=str(tmp_path))
        assert done.stdout, done.stderr
        _, fit, spilling, broken, summary = done.stdout.splitlines()
        assert done.returncode == 1
        assert "NOT FIT" not in fit
        assert re.search(r"NOT FIT: \d+ bytes spilled", spilling)
        assert "NOT FIT" in broken
        assert summary == f"3 combinations, {compiled} of them compiled now, 2 not fit to ship"


def test_launches_are_specialised_on_nothing_else():
    """Prevents Triton from specialising a launch on its arguments' values: that kernel was never checked."""
    code = """
import compile_kernels
for name in (
    "score_kernel", "latent_kernel", "scale_kernel", "importance_kernel", "keep_kernel", "moves_kernel", "move_kernel",
    "value_size_kernel",
):
    for parameter in compile_kernels.kernel_named(name).params:
        assert parameter.is_constexpr or parameter.do_not_specialize, (name, parameter.name)
"""
    done = run(["-c", code])
    assert done.returncode == 0, done.stderr
