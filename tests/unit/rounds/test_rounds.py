"""The plan of a round, which depends on no device and no tensor."""

import dataclasses
import functools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_triattn.config import LEAST_SHARE, MOST_SHARE, Config
from sglang_triattn.kernels.compact.reference import cut_column
from sglang_triattn.rounds.plan import due_length, frozen_length, max_kv_tokens, plan_eviction, plan_round
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s", budget=100, interval=30, recent=10))


def plan(**changes):
    arguments = {"frozen": 64, "length": 64 + 130, "evicted_before": 0, "page_size": 1, **changes}
    return plan_round(CONFIG, **arguments)


def test_due_exactly_at_budget_plus_interval():
    """Prevents a round one token early, which would break exactness, or late, which would break the bound."""
    assert plan(length=64 + 129) is None
    due = plan()
    assert (due.private_length, due.new_length, due.evicted_tokens, due.freed_slots) == (130, 164, 30, 30)


@pytest.mark.parametrize(("frozen", "kept"), [(0, 100), (64, 36), (89, 11), (90, 10), (91, 10), (500, 10)])
def test_total_scope_counts_the_frozen_prefix(frozen, kept):
    """Prevents a budget that ignores the prefix, or a long prefix that leaves no recent tokens."""
    config = dataclasses.replace(CONFIG, budget_scope="total")
    plan = functools.partial(plan_round, config, frozen=frozen, evicted_before=0, page_size=1)
    assert plan(length=frozen + kept + 29) is None
    due = plan(length=frozen + kept + 30)
    assert (due.kept_private, due.new_length) == (kept, frozen + kept)
    assert dataclasses.replace(config, recent=0).budget_for(500) == 1


def test_next_position_is_the_logical_length():
    """Prevents scoring at the physical length after the first round."""
    assert plan(evicted_before=900).next_position == 64 + 130 + 900


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("length", [194, 195, 700])
def test_freed_slots_are_whole_pages(page_size, length):
    """Prevents counting evicted tokens as memory: only whole pages after the kept tokens come back."""
    frozen = 128
    due = plan(frozen=frozen, length=frozen + length, page_size=page_size)
    held = {position // page_size for position in range(due.old_length)}
    needed = {position // page_size for position in range(due.new_length)}
    assert due.freed_slots == len(held - needed) * page_size


def test_prompt_is_frozen_with_and_without_a_tree():
    """Prevents eviction of prompt tokens that no tree protects (radix cache off, retracted requests)."""
    assert frozen_length(CONFIG, protected=0, prompt_length=37, page_size=1) == 37
    assert frozen_length(CONFIG, protected=0, prompt_length=37, page_size=16) == 32
    assert frozen_length(CONFIG, protected=48, prompt_length=37, page_size=16) == 48


def test_first_tokens_and_shared_prefix_stay_of_a_compacted_prompt():
    """Prevents evicting attention sinks, or what the tree shares, when the prompt may be compacted."""
    config = dataclasses.replace(CONFIG, prompt="compact", sinks=4)
    assert frozen_length(config, protected=0, prompt_length=37, page_size=16) == 4
    assert frozen_length(config, protected=32, prompt_length=37, page_size=16) == 32
    assert frozen_length(dataclasses.replace(CONFIG, sinks=4), protected=0, prompt_length=3, page_size=16) == 4


def test_bound_is_where_a_round_runs_or_the_end():
    """Prevents reserving less than a request may hold, or more than it can."""
    assert max_kv_tokens(CONFIG, frozen=64, logical_end=10_000) == 64 + 130
    assert max_kv_tokens(CONFIG, frozen=64, logical_end=100) == 100


def test_rounds_under_pressure_keep_less():
    """Prevents early rounds below the floor that the user set, and rounds that evict nothing."""
    config = dataclasses.replace(CONFIG, pressure_budget=40).under_pressure()
    early = functools.partial(plan_eviction, config, frozen=64, evicted_before=0, page_size=1)
    assert early(length=64 + 41).kept_private == 40
    assert early(length=64 + 40) is None
    assert CONFIG.under_pressure().budget_for(64) == 100


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    share=st.just(0.0) | st.floats(LEAST_SHARE, MOST_SHARE),
    budget=st.integers(4, 60),
    interval=st.integers(1, 40),
    page_size=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([0, 4]),
    frozen=st.integers(0, 50),
    tokens=st.integers(1, 900),
)
def test_a_share_that_a_round_keeps(share, budget, interval, page_size, window, frozen, tokens):
    """Prevents a round that keeps less than the share of a long answer, one that comes early or late, and a bound that
    a request exceeds."""
    config = Config(budget=budget, interval=interval, recent=4, keep_share=share)
    rules = complete(config, window=window, page_size=page_size)
    step, length, evicted = max(interval, rules.round_to), frozen, 0
    bound = max_kv_tokens(rules, frozen=frozen, logical_end=frozen + tokens, page_size=page_size)
    for private in range(1, tokens + 1):
        length += 1
        assert length <= bound
        keep = max(budget, 4 + rules.round_to - 1, math.ceil(share * private))
        due = due_length(rules, frozen=frozen, page_size=page_size, evicted_before=evicted)
        found = plan_round(rules, frozen=frozen, length=length, evicted_before=evicted, page_size=page_size)
        assert (found is not None) == (length >= due) == (length - frozen - keep >= step)
        if found is not None:
            assert keep <= found.kept_private < keep + rules.round_to
            length, evicted = found.new_length, evicted + found.evicted_tokens
        later = max_kv_tokens(
            rules, frozen=frozen, logical_end=frozen + tokens - evicted, evicted_before=evicted, page_size=page_size
        )
        assert length <= later <= bound
    room = bound - frozen
    longest = rules.longest_private(frozen, room)
    assert longest is None or longest >= tokens or rules.most_private(frozen, tokens) > room
    if longest:
        assert rules.most_private(frozen, longest) <= room < rules.most_private(frozen, longest + 2)


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("scope", ["private", "total"])
def test_rounds_of_models_with_windows_evict_whole_pages(page_size, scope):
    """Prevents a round that would have to copy the newest tokens, on whose places window layers rely, and a bound that
    leaves no room for the page that cannot go."""
    config = complete(Config("s", budget=100, interval=30, budget_scope=scope), window=48, page_size=page_size)
    for frozen in (4, 64, 90, 500):
        due = frozen + config.trigger(frozen)
        arguments = {"frozen": frozen, "evicted_before": 0, "page_size": page_size}
        assert plan_round(config, length=due - 1, **arguments) is None
        for length in (due, due + 7, due + 200):
            found = plan_round(config, length=length, **arguments)
            assert found.evicted_tokens % page_size == 0
            assert found.freed_slots == found.evicted_tokens > 0
            assert config.budget_for(frozen) <= found.kept_private < config.budget_for(frozen) + page_size
            cut = cut_column(found.kept_private, config.recent, frozen, found.evicted_tokens, page_size)
            assert 0 <= cut <= found.kept_private - config.recent
        assert max_kv_tokens(config, frozen=frozen, logical_end=10_000) == due
