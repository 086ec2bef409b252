"""Rows' room for the tokens that steps draft."""

from types import SimpleNamespace

import pytest
from sglang.srt import runtime_context
from sglang.srt.mem_cache import allocation_sizing

from sglang_triattn.patches.request.draft_reserve import _make_room


@pytest.mark.parametrize(
    ("algorithm", "reserve", "expected"), [(None, 40, 12), ("EAGLE", 40, 40), ("EAGLE", 8, 12), ("NGRAM", 24, 24)]
)
def test_the_reserve_of_a_row_at_the_end_of_the_context(monkeypatch, algorithm, reserve, expected):
    """Prevents slots for drafts that are written to the next row, and rows shorter than SGLang's own, which are 12
    entries longer than the context here."""
    monkeypatch.setattr(runtime_context, "get_spec", lambda: SimpleNamespace(speculative_algorithm=algorithm))
    monkeypatch.setattr(allocation_sizing, "get_alloc_reserve_per_decode", lambda: reserve)
    assert _make_room(12) == expected
