"""Input tokens of resumed turns: where they lie in a row after each round, and what the plan makes of them."""

import random

import pytest

from sglang_triattn.config import Config
from sglang_triattn.request.row_record import RowRecord
from sglang_triattn.rounds.inputs import NO_INPUTS, TurnInputs
from sglang_triattn.rounds.plan import due_length, frozen_length, max_kv_tokens, plan_eviction, plan_round
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s", budget=100, interval=32, recent=10))
WINDOWED = complete(Config("s", budget=100, interval=32, recent=20), window=20)


@pytest.mark.parametrize(
    ("page_size", "stretches", "waiting"),
    [
        (1, [(10, 13), (20, 25)], ((10, 13), (20, 25))),
        (1, [(10, 13), (13, 25)], ((10, 25),)),
        (16, [(20, 21)], ((16, 32),)),
        (16, [(16, 32), (40, 41)], ((16, 48),)),
        # A turn that resumes within the page in which the last one ended.
        (16, [(17, 20), (24, 40)], ((16, 48),)),
        (16, [(17, 20), (70, 71)], ((16, 32), (64, 80))),
    ],
)
def test_stretches_are_whole_pages(page_size, stretches, waiting):
    """Prevents a page from being moved twice or in part, and an input token outside every stretch."""
    inputs = NO_INPUTS
    for start, end in stretches:
        inputs = inputs.appended(start, end, page_size)
    assert inputs == TurnInputs(0, waiting)


def test_inputs_count_as_the_frozen_part_does():
    """Prevents a round that comes early or evicts too much because a turn brought many tokens."""
    inputs = NO_INPUTS.appended(150, 650, 1)
    given = {"frozen": 50, "evicted_before": 900, "page_size": 1, "inputs": inputs}
    assert plan_round(CONFIG, length=681, **given) is None
    plan = plan_round(CONFIG, length=682, **given)
    assert (plan.frozen, plan.new_length, plan.evicted_tokens) == (550, 650, 32)
    assert (plan.moved, plan.target, plan.newest) == (((150, 650),), 50, 0)
    assert plan.inputs_after(inputs) == TurnInputs(550, ())
    assert due_length(CONFIG, frozen=50, page_size=1, inputs=inputs) == 682
    assert max_kv_tokens(CONFIG, frozen=50, logical_end=10_000, inputs=inputs) == 682
    assert max_kv_tokens(CONFIG, frozen=50, logical_end=600, inputs=inputs) == 600


def test_newest_tokens_of_window_layers_do_not_move():
    """Prevents input that has moved out of a window, and input in a window that a round takes for generated."""
    inputs = NO_INPUTS.appended(100, 190, 1)
    plan = plan_eviction(WINDOWED, frozen=10, length=200, evicted_before=5, page_size=1, inputs=inputs)
    assert plan is None  # 100 generated tokens
    plan = plan_eviction(WINDOWED, frozen=10, length=205, evicted_before=5, page_size=1, inputs=inputs)
    assert (plan.moved, plan.newest, plan.evicted_tokens) == (((100, 185),), 20, 5)
    assert plan.kept_private == 100 + 5
    assert plan.inputs_after(inputs) == TurnInputs(95, ((180, 185),))


def test_first_moved_entry_ends_the_exact_part():
    """Prevents the tree from getting entries that no longer lie at their logical positions."""
    record = RowRecord(20, evicted_tokens=30, first_evicted_pos=70, inputs=NO_INPUTS.appended(90, 120, 1))
    plan = plan_eviction(CONFIG, frozen=20, length=300, evicted_before=30, page_size=1, inputs=record.inputs)
    record.add_round(plan, lambda: 80, 0)
    assert record.exact_prefix_len() == 20


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("rules", [CONFIG, WINDOWED], ids=["full", "windows"])
def test_no_input_is_lost_over_many_turns(page_size, rules):
    """Prevents stretches whose places are off by a token after some round: replays rows as lists of tokens."""
    draw = random.Random(page_size)
    for _ in range(8):
        frozen = frozen_length(rules, 0, draw.randrange(1, 60), page_size)
        row, inputs, computed, brought = list(range(frozen + 150)), NO_INPUTS, frozen + 150, set()
        for _ in range(6):
            length = draw.randrange(1, 90)
            inputs = inputs.appended(len(row), len(row) + length, page_size)
            brought |= set(range(computed, computed + length))
            row += range(computed, computed + length)
            computed += length
            for _ in range(draw.randrange(0, 200)):
                row.append(computed)
                computed += 1
                given = {"evicted_before": computed - len(row), "page_size": page_size, "inputs": inputs}
                plan = plan_round(rules, frozen=frozen, length=len(row), **given)
                if plan is not None:
                    row, inputs = replayed(row, plan, rules, draw), plan.inputs_after(inputs)
                assert brought <= set(row)
                first = inputs.target(frozen, page_size)
                waiting = {row[place] for part in inputs.waiting_in(first, len(row)) for place in range(*part)}
                assert brought & set(row[first:]) <= waiting, "an input token may be scored"
                assert len(row) <= due_length(rules, frozen=frozen, page_size=page_size, inputs=inputs)


def replayed(row: list[int], plan, rules, draw: random.Random) -> list[int]:
    """The row after a round that keeps its newest tokens and any others."""
    moved = [token for start, end in plan.moved for token in row[start:end]]
    others = [token for token in row[plan.target :] if token not in set(moved)]
    recent = max(rules.recent, plan.newest)
    older, newest = others[: len(others) - recent], others[len(others) - recent :]
    kept = draw.sample(older, plan.kept_private - recent)
    return [*row[: plan.target], *moved, *kept, *newest]


@pytest.mark.parametrize(
    ("page_size", "end", "left"),
    [(1, 25, ((10, 13), (20, 25))), (1, 22, ((10, 13), (20, 22))), (1, 20, ((10, 13),)), (16, 22, ((0, 16), (16, 32)))],
)
def test_a_row_that_is_cut_loses_the_inputs_after_the_cut(page_size, end, left):
    """Prevents tokens that a later turn generates from counting as input of one whose end was cut off."""
    stretches = ((10, 13), (20, 25)) if page_size == 1 else ((0, 16), (16, 48))
    assert TurnInputs(5, stretches).cut(end, page_size) == TurnInputs(5, left)
