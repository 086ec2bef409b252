"""Torch in the place of SGLang's kernels around drafted tokens."""

from interpreter import assert_pass_interpreted


def test_it_computes_what_the_kernels_do():
    """Prevents drafts that are verified on CPUs by other rules than on GPUs."""
    assert_pass_interpreted("tests/support/unit/drafts_by_kernels.py")
