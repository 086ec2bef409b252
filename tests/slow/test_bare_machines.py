"""What works on machines that lack some of what SGLang needs, each in a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from checkout import ROOT
from plan_cases import QWEN3_32B

# What a kernel machine has, and what no kernel may need.
BARE_MACHINE = """
import sys
import pytest
for name in ("sglang", "transformers", "safetensors", "hypothesis", "requests", "matplotlib", "tqdm", "psutil"):
    sys.modules[name] = None
sys.exit(pytest.main(["-q", "--collect-only", "tests/gpu"]))
"""


def test_gpu_tests_are_found_without_sglang():
    """Prevents kernel tests that run only where all of SGLang is installed."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    command = [sys.executable, "-P", "-c", BARE_MACHINE]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert " tests collected" in done.stdout


def test_plan_and_check_need_neither_sglang_nor_transformers():
    """Prevents a calculator that cannot run, or takes half a minute, when no server is to be started."""
    code = (
        "import sys; from sglang_triattn.cli import main as cli\n"
        f"assert cli.main(['plan', '--model', {str(QWEN3_32B)!r}, '--memory', '80G']) == 0\n"
        f"assert cli.main(['check', '--model', {str(QWEN3_32B)!r}]) == 0\n"
        "assert not {'sglang', 'transformers', 'triton'} & set(sys.modules), 'heavy import'"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_checkout_hides_no_package():
    """Prevents the top-level `kernels` from hiding the PyPI package of that name, which SGLang imports, and `patches`
    from not being found when Python starts in the checkout's folder."""
    code = (
        "import benchmarks, kernels, sglang_triattn.patches.plugin, sglang_triattn.kernels.score.reference; "
        "print(kernels.__file__)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(ROOT)
