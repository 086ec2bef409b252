"""Random histories where window layers have a KV pool of their own: two pools, each with every slot owned once."""

from __future__ import annotations

import pytest

from histories import Conversing, run_histories
from sets import matrix, wide

LENGTHS = {"budget": 24, "interval": 8, "recent": 14, "pressure_budget": 20, "window": 10}


@pytest.mark.parametrize(
    ("page_size", "selection", "prompt"),
    matrix([1, 4, 16], ["shared-mean", "per-layer-head"], ["frozen", "compact"], strength=1),
)
def test_random_histories_with_two_pools(page_size, selection, prompt):
    """Prevents a slot of either pool from being lost or owned twice, and a window from losing what it still reads."""
    counts = run_histories(
        3, page_size=page_size, selection=selection, prompt=prompt, pool=max(192, 24 * page_size), **LENGTHS
    )
    assert counts["rounds"] > 3


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 4])
def test_random_histories_of_conversations_with_two_pools(page_size):
    """Prevents inputs of resumed turns from moving out of a window, being lost, or taking their peers along."""
    shorter = {**LENGTHS, "budget": 16, "recent": 11, "pressure_budget": 12}
    counts = run_histories(4, page_size=page_size, histories=Conversing, pool=320, **shorter)
    assert counts["rounds of rows with inputs"] > 2


@pytest.mark.parametrize(("options", "page_size"), matrix([{"radix": False}, {"force_miss": True}], [1, 4], strength=1))
def test_random_histories_with_two_pools_and_another_tree(page_size, options):
    """Prevents the same without a tree, and where a prompt that the tree has is computed again."""
    assert run_histories(4, page_size=page_size, **options, **LENGTHS)["rounds"] > 4


@pytest.mark.parametrize(
    ("page_size", "selection", "prompt", "queued"),
    matrix([1, 4, 16], ["shared-mean", "per-layer-head"], ["frozen", "compact"], [5, 0], strength=1),
)
def test_random_histories_with_two_pools_and_drafts(page_size, selection, prompt, queued):
    """Prevents slots for drafted tokens from being lost or owned twice in either pool, a queued step's drafts from
    losing theirs, and a window from losing what the first drafted token reads."""
    counts = run_histories(
        3,
        page_size=page_size,
        selection=selection,
        prompt=prompt,
        pool=max(224, 26 * page_size),
        reserve=10,
        queued=queued,
        **LENGTHS,
    )
    assert counts["rounds"] > 3


@pytest.mark.parametrize("page_size", [wide(1), 4])
def test_random_histories_of_drafting_conversations_with_two_pools(page_size):
    """Prevents rows that wait for a next turn from keeping slots for drafts, in either pool."""
    shorter = {**LENGTHS, "budget": 16, "recent": 11, "pressure_budget": 12}
    counts = run_histories(4, page_size=page_size, histories=Conversing, pool=320, reserve=10, queued=5, **shorter)
    assert counts["rounds of rows with inputs"] > 2
