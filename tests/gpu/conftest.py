"""Kernel tests: natively on a CUDA device, or on any machine under Triton's interpreter (TRITON_INTERPRET=1).

tests/slow/test_interpreted*.py run them the second way in their own processes, because the interpreter is chosen
when a kernel is defined. Without a device and without the interpreter nothing here can run, so nothing is collected.
"""

import os

import pytest
import torch

import checkout

checkout.make_importable()

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
RUNNABLE = INTERPRETED or torch.cuda.is_available()

collect_ignore_glob = [] if RUNNABLE else ["test_*.py"]


def pytest_terminal_summary(terminalreporter):
    if not RUNNABLE:
        terminalreporter.write_line(
            "tests/gpu was left out: no CUDA device here; tests/slow/test_interpreted*.py run it interpreted"
        )


@pytest.fixture(scope="session")
def device() -> str:
    return "cpu" if INTERPRETED else "cuda"
