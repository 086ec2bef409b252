"""The kernels under Triton's interpreter; the selection kernels are in test_interpreted_selection.py."""

import pytest

from interpreter import SELECTION, assert_pass_interpreted
from sets import wide

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.mark.parametrize("chosen", ["not wide", wide("wide")])
def test_kernels(chosen):
    """Prevents kernels from drifting from their references when no GPU is at hand."""
    assert_pass_interpreted("tests/gpu", "-m", chosen, *(f"--ignore={path}" for path in SELECTION))


@pytest.mark.parametrize("chosen", ["not wide", wide("wide")])
def test_kernels_in_rounds(chosen):
    """Prevents kernels from drifting from the rounds that use them."""
    assert_pass_interpreted("tests/support/property/rounds_by_kernels.py", "-m", chosen)


def test_what_rounds_leave():
    """Prevents attention on a GPU that reads evicted slots."""
    assert_pass_interpreted("tests/support/property/backend_metadata.py")


@pytest.mark.parametrize("chosen", ["not wide", wide("wide")])
def test_plans_of_attention(chosen):
    """Prevents attention on a GPU, a draft model's too, that reads other slots than its requests'."""
    assert_pass_interpreted(
        "-m",
        chosen,
        "tests/support/property/draft_metadata.py",
        "tests/support/property/target_metadata.py",
        "tests/support/property/window_metadata.py",
    )
