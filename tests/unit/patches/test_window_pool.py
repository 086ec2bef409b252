"""What a window layers' pool of its own allows, without a server: refusals, and rounds that would touch the window."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.request import window_pool
from sglang_triattn.patches.request.window_pool import WindowPool, check_reach
from sglang_triattn.patches.rounds.launches import RoundShape
from sglang_triattn.patches.rounds.window_peers import free_peers
from sglang_triattn.rounds.plan import Plan


def scheduler(*, size=400, page_size=16, reach=127):
    """A scheduler as far as a WindowPool looks at it before any request."""
    allocator = SimpleNamespace(swa_attn_allocator=None, size_swa=size, page_size=page_size)
    return SimpleNamespace(
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(2, 8)),
        tree_cache=SimpleNamespace(swa_retain_window=reach),
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
    )


def test_a_pool_too_small_for_one_request_is_refused():
    """Prevents a server that accepts a request and then waits forever for slots of its window."""
    check_reach(scheduler(), 128)
    with pytest.raises(TriAttentionError, match=r"160 of them .* --swa-full-tokens-ratio"):
        check_reach(scheduler(size=180), 128)


def test_a_pool_too_small_for_drafts_is_refused(monkeypatch):
    """Prevents the same where each step also needs slots for the tokens that it drafts."""
    check_reach(scheduler(size=200), 128)
    monkeypatch.setattr(window_pool, "reserve_per_row", lambda _: 10)
    with pytest.raises(TriAttentionError, match="176 of them"):
        check_reach(scheduler(size=200), 128)


def test_a_window_ends_at_computed_entries():
    """Prevents slots for drafted tokens from counting as computed ones, for which K/V that the next query sees would be
    given back."""
    ends = []
    tree = SimpleNamespace(supports_swa=lambda: True, evict_sliding_windows=lambda _, end: ends.append(end))
    request = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=100, kv_allocated_len=112))
    window_pool.slide_window(request, tree)
    assert ends == [99]


def test_a_window_wider_than_what_rounds_keep_is_refused():
    """Prevents rounds from giving back what SGLang still counts as part of the window."""
    with pytest.raises(TriAttentionError, match="keep 129 tokens"):
        check_reach(scheduler(reach=128), 128)


@pytest.mark.parametrize(
    ("recent", "strategy", "cut"), [(127, "remap", 150), (128, "fill", 150), (128, "slide", 150)], ids=str
)
def test_a_round_that_touches_the_window_is_a_bug(recent, strategy, cut):
    """Prevents K/V of window layers from staying in place when a round moves or frees their slots."""
    plan = Plan(frozen=0, old_length=200, new_length=150, next_position=200, freed_slots=50)
    row = SimpleNamespace(request=SimpleNamespace(rid="r1"))
    launch = SimpleNamespace(shape=RoundShape(150, recent, strategy, cut, 256), rounds=[(row, plan)])
    with pytest.raises(RuntimeError, match="r1 would touch the newest 128 tokens"):
        free_peers(WindowPool(scheduler(page_size=1)), [launch])
