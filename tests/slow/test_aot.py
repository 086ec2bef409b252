"""What `make kernels` would let through; it compiles every kernel for every GPU generation served."""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

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


# Prints, for each kernel, where the figures of its combinations are kept.
KEPT = """
import json
import compile_kernels
kept = {}
for name, settings in compile_kernels.combinations(90):
    kept.setdefault(name, []).append(compile_kernels.cache_file(90, name, settings).name)
print(json.dumps(kept))
"""
# A constant inside each kernel, by file.
CONSTANTS = {
    "score/score_kernel.py": ("NC: tl.constexpr = 4 * GP", "NC: tl.constexpr = 8 * GP"),
    "score/latent_kernel.py": ("ALL: tl.constexpr = 3", "ALL: tl.constexpr = 2"),
}


def kept_by(checkout: Path) -> dict[str, list[str]]:
    done = run(["-c", KEPT], PYTHONPATH=os.pathsep.join(map(str, (checkout, TOOL.parent))))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_changed_kernel_is_compiled_again(tmp_path):
    """Prevents figures of a kernel's last version, kept between runs, from passing for those of this one."""
    shutil.copytree(ROOT / "sglang_triattn", tmp_path / "sglang_triattn", ignore=shutil.ignore_patterns("__pycache__"))
    kernels = tmp_path / "sglang_triattn" / "kernels"
    before = kept_by(tmp_path)
    assert len(set(itertools.chain(*before.values()))) == sum(map(len, before.values()))
    for file, (constant, planted) in CONSTANTS.items():
        source = (kernels / file).read_text()
        assert source.count(constant) == 1
        (kernels / file).write_text(source.replace(constant, planted))
    after = kept_by(tmp_path)
    changed = {name for name in before if not set(before[name]) & set(after[name])}
    assert changed == {Path(file).stem for file in CONSTANTS}
    assert all(before[name] == after[name] for name in before.keys() - changed)


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
