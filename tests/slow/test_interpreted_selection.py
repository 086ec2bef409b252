"""The scorer and the selection kernels under Triton's interpreter; the others are in test_interpreted.py."""

import pytest

from interpreter import SELECTION, assert_pass_interpreted

pytest.importorskip("triton", reason="Triton has no wheel for this platform")


def test_kernels_that_select():
    """Prevents kernels from drifting from their references when no GPU is at hand."""
    assert_pass_interpreted(*SELECTION)
