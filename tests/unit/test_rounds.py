"""The plan of a round, which no device and no tensor may influence."""

import dataclasses
import functools
from types import SimpleNamespace

import pytest

from sglang_triattn.config import Config
from sglang_triattn.patches.requests import (
    adopt,
    begin_state,
    drop_state,
    long_enough,
    recent_of,
    state_of,
    wait_until_due,
)
from sglang_triattn.request_settings import Asked
from sglang_triattn.rounds import RequestState, frozen_length, plan_eviction, plan_round, row_bound

CONFIG = Config("s", budget=100, interval=30, recent=10)


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
    assert dataclasses.replace(config, recent=0).kept_private(500) == 1


def test_next_position_is_the_logical_length():
    """Prevents scoring at the physical length after the first round."""
    assert plan(evicted_before=900).next_position == 64 + 130 + 900


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("length", [194, 195, 700])
def test_freed_slots_are_whole_pages(page_size, length):
    """Prevents counting evicted tokens as memory: only whole pages behind the kept tokens come back."""
    frozen = 128
    due = plan(frozen=frozen, length=frozen + length, page_size=page_size)
    held = {position // page_size for position in range(due.old_length)}
    needed = {position // page_size for position in range(due.new_length)}
    assert due.freed_slots == len(held - needed) * page_size


def test_prompt_is_frozen_with_and_without_a_tree():
    """Prevents eviction of prompt tokens where no tree protects them (radix cache off, retracted requests)."""
    assert frozen_length(CONFIG, protected=0, prompt_length=37, page_size=1) == 37
    assert frozen_length(CONFIG, protected=0, prompt_length=37, page_size=16) == 32
    assert frozen_length(CONFIG, protected=48, prompt_length=37, page_size=16) == 48


def test_first_tokens_and_shared_prefix_stay_of_a_compacted_prompt():
    """Prevents eviction of attention sinks, or of what the tree shares, where the prompt may be compacted."""
    config = dataclasses.replace(CONFIG, prompt="compact", sinks=4)
    assert frozen_length(config, protected=0, prompt_length=37, page_size=16) == 4
    assert frozen_length(config, protected=32, prompt_length=37, page_size=16) == 32
    assert frozen_length(dataclasses.replace(CONFIG, sinks=4), protected=0, prompt_length=3, page_size=16) == 4


def test_bound_is_where_a_round_runs_or_the_end():
    """Prevents reserving less than a request comes to hold, or more than it can."""
    assert row_bound(CONFIG, frozen=64, logical_end=10_000) == 64 + 130
    assert row_bound(CONFIG, frozen=64, logical_end=100) == 100


def test_rounds_under_pressure_keep_less():
    """Prevents early rounds below the floor that the user set, and rounds that evict nothing."""
    config = dataclasses.replace(CONFIG, pressure_budget=40).under_pressure()
    early = functools.partial(plan_eviction, config, frozen=64, evicted_before=0, page_size=1)
    assert early(length=64 + 41).kept_private == 40
    assert early(length=64 + 40) is None
    assert CONFIG.under_pressure().kept_private(64) == 100


@pytest.mark.parametrize("holes", [[], [9], [9, 7], [5, 7, 9, 8], [9, 8, 5, 7], [9, 8, 7, 0]])
def test_exact_length_is_the_first_hole_of_all_rounds(holes):
    """Prevents K/V behind a hole from entering the tree, and a request of ten thousand rounds that keeps them all."""
    state, unread = RequestState(), []
    for number, hole in enumerate(holes):
        unread.append(number)
        state.add_hole(lambda number=number, hole=hole: unread.remove(number) or hole)
        assert unread == list(range(number + 1))[-2:], "the copies of the last two rounds may not have been made yet"
    assert state.exact_length() == min(holes, default=0)


@pytest.mark.parametrize(("mixed", "recent"), [(0, 10), (150, 10), (190, 10), (195, 5), (200, 0)])
def test_a_resumed_row_says_how_many_of_its_newest_tokens_are_known(mixed, recent):
    """Prevents old tokens from being kept as the newest ones in a row whose order an earlier turn's round mixed up."""
    request = SimpleNamespace(beam_group=None, skip_radix_cache_insert=False, kv=SimpleNamespace(kv_allocated_len=200))
    adopt(request, Asked(CONFIG))
    begin_state(request, RequestState(rounds=3, mixed_length=mixed))
    assert recent_of(request) == recent


def row(length: int, protected: int = 8) -> SimpleNamespace:
    """A request of 10 prompt tokens that holds so many entries."""
    kv = SimpleNamespace(kv_allocated_len=length, cache_protected_len=protected)
    request = SimpleNamespace(beam_group=None, skip_radix_cache_insert=False, kv=kv, origin_input_ids=range(10))
    adopt(request, Asked(CONFIG))
    begin_state(request, RequestState())
    return request


def test_a_request_is_looked_at_again_when_its_row_has_grown_enough():
    """Prevents a round that comes a token late, and a plan for every request in every step."""
    request = row(20)
    due = 10 + CONFIG.trigger(10)
    assert long_enough([request]) == [0]
    wait_until_due(request, page_size=1)
    for length in (21, due - 1):
        request.kv.kv_allocated_len = length
        assert long_enough([request, row(5), request]) == [1]
    request.kv.kv_allocated_len = due
    assert long_enough([request]) == [0]


def test_what_was_known_of_a_row_ends_with_it():
    """Prevents a late round after the tree took more of a row, after a retraction, or in a turn with less budget."""
    request = row(20)
    wait_until_due(request, page_size=1)
    request.kv.cache_protected_len = 16
    assert long_enough([request]) == [0]
    wait_until_due(request, page_size=1)
    assert long_enough([request]) == []
    begin_state(request, dataclasses.replace(state_of(request)))
    assert long_enough([request]) == [0]
    wait_until_due(request, page_size=1)
    drop_state(request)
    assert long_enough([request]) == [0]
