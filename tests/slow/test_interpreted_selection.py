"""The scorer and the kernels that select under Triton's interpreter; the others are in test_interpreted.py."""

import pytest

from interpreter import SELECTION, assert_pass_interpreted

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def test_kernels_that_select():
    """Prevents kernels from drifting from their references where no GPU is at hand."""
    assert_pass_interpreted(*SELECTION)
