"""The scorer and the selection kernels under Triton's interpreter; the others are in test_interpreted.py."""

import pytest

from interpreter import SELECTION, assert_pass_interpreted
from sets import wide

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


@pytest.mark.parametrize("chosen", ["not wide", wide("wide")])
def test_kernels_that_select(chosen):
    """Prevents kernels from drifting from their references when no GPU is at hand."""
    assert_pass_interpreted("-m", chosen, *SELECTION)
