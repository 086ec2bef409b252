"""Copies of rows that are resumed: turns that fail, are repeated, or branch, over SGLang's real tree and allocators."""

from __future__ import annotations

import pytest
import torch

from checks import check_books, check_rounds, check_row
from histories import Repeating, run_histories
from running import Running
from sets import matrix, wide
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.row_copy import RowCopier
from simulation import Simulation

WINDOW = {"budget": 24, "interval": 8, "recent": 14, "window": 10, "pool": 512}
KINDS = [
    {"page_size": 1, "selection": "shared-mean", "pool": 320},
    {"page_size": 4, "selection": "per-layer-head", "pool": 320},
    {"page_size": 1, **WINDOW},
    {"page_size": 4, **WINDOW},
]
every_kind = pytest.mark.parametrize("options", KINDS, ids=str)


def decode(sim: Simulation, turn: Running, steps: int) -> None:
    """Decodes one request, with its rounds, and checks all rows at every step."""
    for _ in range(steps):
        check_rounds(sim)
        assert sim.decode(turn)
        for running in sim.running:
            check_row(sim, running)
    check_books(sim)


def first_turn(sim: Simulation, conversation: str | None = "a") -> list[int]:
    """The text of a conversation's first turn, which had rounds and left its row."""
    turn = sim.request([7] * 6, conversation)
    assert sim.admit(turn, 1000)
    decode(sim, turn, 45)
    sim.release(turn, finish=True)
    assert sim.conversations.parked == 1
    return turn.tokens


def begin(sim: Simulation, text: list[int], start: str = "resumed") -> Running:
    """A running turn that has had a round."""
    turn = sim.request([*text, 2, 3, 1], "a")
    assert sim.admit(turn, 1000)
    decode(sim, turn, 20)
    owner = turn.req.triattention
    assert owner.start == start
    assert owner.rounds > 0
    return turn


def spares(sim: Simulation) -> list[bool]:
    return [idle.spare for idle in sim.conversations.idle().values()]


@every_kind
def test_a_turn_that_fails_costs_nothing(options):
    """Prevents a turn that is aborted after a round from taking along the row that it has compacted."""
    sim = Simulation(**options)
    text = first_turn(sim)
    turn = begin(sim, text)
    assert spares(sim) == [True]
    sim.release(turn, finish=True, abort=True)
    # The retry goes back to the copy, which has not seen that round, and what was aborted makes way.
    again = begin(sim, text)
    assert spares(sim) == [True]
    sim.release(again, finish=True)
    assert again.tokens == turn.tokens


@every_kind
def test_a_turn_that_was_answered_can_be_repeated(options):
    """Prevents an answer that never reached its client, or that is asked for again, from starting anew; and copies of
    turns that are not repeated from piling up."""
    sim = Simulation(**options)
    text = first_turn(sim)
    turn = begin(sim, text)
    sim.release(turn, finish=True)
    assert sorted(spares(sim)) == [False, True]
    again = begin(sim, text)
    assert spares(sim) == [True]
    # What it repeats made way for it, and is no row that a later turn misses.
    assert sim.conversations.start_without_row("a") == "new"
    sim.release(again, finish=True)
    assert again.tokens == turn.tokens
    following = begin(sim, again.tokens)
    # The copy from before the turn that it follows has gone.
    assert spares(sim) == [True]
    sim.release(following, finish=True)
    assert sorted(spares(sim)) == [False, True]


@every_kind
def test_turns_that_branch_at_the_same_time(options):
    """Prevents a second request that goes on after the same text from starting anew while the first one runs."""
    sim = Simulation(**options)
    text = first_turn(sim)
    turns = [begin(sim, text), begin(sim, text)]
    assert turns[0].tokens == turns[1].tokens
    for turn in turns:
        sim.release(turn, finish=True)
    check_books(sim)
    assert sim.conversations.parked == 1


@every_kind
def test_copies_make_way_first(options):
    """Prevents a copy from taking memory that a request needs, or from outliving conversations that are waited for."""
    sim = Simulation(**options)
    text = first_turn(sim)
    other = sim.request([6] * 6, "b")
    assert sim.admit(other, 1000)
    decode(sim, other, 45)
    sim.release(other, finish=True)
    turn = begin(sim, text)
    assert sorted(spares(sim)) == [False, True]
    assert sim.conversations.drop_one()
    assert spares(sim) == [False]
    check_books(sim)
    # Without it, the turn's own row is what its conversation has.
    sim.release(turn, finish=True, abort=True)
    assert sim.conversations.parked == 2


def test_no_copy_without_room():
    """Prevents a copy from taking slots that are reserved, and a row that cannot be copied from not being resumed."""
    sim = Simulation(1, pool=320)
    text = first_turn(sim)
    sim.conversations.copier = copier = sim.conversations.copier
    copy = copier.copy
    copier.copy = lambda kv, room: copy(kv, kv.kv_allocated_len - kv.cache_protected_len)
    turn = begin(sim, text)
    assert spares(sim) == []
    sim.release(turn, finish=True)
    assert sim.conversations.parked == 1


def test_a_copy_is_made_after_the_first_token():
    """Prevents a first token that waits for a copy, and a copy without K/V that outlives its row."""
    sim = Simulation(1, pool=320)
    turn = sim.request([*first_turn(sim), 2, 3, 1], "a")
    assert sim.admit(turn, 1000)
    (idle,) = sim.conversations.idle().values()
    protected, length = idle.kv.cache_protected_len, idle.kv.kv_allocated_len
    rows = (sim.rows.req_to_token[kv.req_pool_idx, protected:length] for kv in (turn.req.kv, idle.kv))
    own, copied = (sim.content(slots) for slots in rows)
    assert not torch.equal(own, copied)
    sim.release(turn, finish=True, abort=True)
    assert torch.equal(own, sim.content(sim.rows.req_to_token[idle.kv.req_pool_idx, protected:length]))


def test_a_copy_that_was_dropped_is_not_made():
    """Prevents K/V from being copied into slots that another request has got meanwhile."""
    sim = Simulation(1, pool=320)
    turn = sim.request([*first_turn(sim), 2, 3, 1], "a")
    assert sim.admit(turn, 1000)
    assert spares(sim) == [True]
    assert sim.conversations.drop_one()
    # They take every slot that is free.
    for number in range(9, 13):
        other = sim.request([number] * min(100, sim.slots.available_size() - 1))
        assert not other.req.origin_input_ids or sim.admit(other, 1000)
    assert sim.slots.available_size() <= 1
    sim.conversations.finish_copies()
    for running in sim.running:
        check_row(sim, running)


@pytest.mark.parametrize(("options", "place"), matrix(KINDS, [Mover, RowCopier], strength=1))
def test_a_copy_that_fails(options, place, monkeypatch):
    """Prevents a failure of the copy from ending a turn that does not need it, or from losing slots and rows."""

    def fail(*_):
        raise RuntimeError("it failed")

    sim = Simulation(**options)
    text = first_turn(sim)
    with monkeypatch.context() as patch:
        patch.setattr(place, "copy" if place is Mover else "_make_room", fail)
        turn = begin(sim, text)
    assert spares(sim) == []
    check_books(sim)
    sim.release(turn, finish=True)
    check_books(sim)


def copy_nothing(patch) -> None:
    patch.setattr(Mover, "copy", lambda self, sources, targets: None)


def unlock_the_prefix(patch) -> None:
    original = Conversations._leave_copy
    patch.setattr(Conversations, "_leave_copy", lambda *args: original(*args) and False)


def keep_every_spare(patch) -> None:
    original = Conversations._drop
    patch.setattr(
        Conversations, "_drop", lambda self, idle: idle is not None and not idle.spare and original(self, idle)
    )


@pytest.mark.parametrize(
    ("fault", "noticed"),
    [(copy_nothing, "other (content|tokens)"), (unlock_the_prefix, "of the tree are locked"), (keep_every_spare, "")],
)
def test_planted_fault_is_noticed(fault, noticed, monkeypatch):
    """Prevents checks that cannot fail: a copy without its K/V, or without its lock, or that is never dropped."""
    fault(monkeypatch)
    with pytest.raises(AssertionError, match=noticed):
        test_a_turn_that_was_answered_can_be_repeated(KINDS[1])


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "selection": "per-layer-head"},
        {"page_size": 4, "conversations": "auto"},
        {"page_size": 4, **WINDOW, "budget": 16, "recent": 11},
        wide({"page_size": 16, "selection": "shared-mean"}),
        wide({"page_size": 1, "reserve": 10, "queued": 5}),
        wide({"page_size": 1, **WINDOW, "prompt": "compact", "turn_inputs": "keep"}),
    ],
    ids=str,
)
def test_random_histories_of_repeated_turns(options):
    """Prevents the same where turns are aborted, repeated and branch in any order, while memory is short."""
    # Rounds that empty whole pages of 16 are rare.
    examples = 12 if options["page_size"] == 16 else 4
    counts = run_histories(examples, histories=Repeating, **{"pool": 320, **options})
    assert counts["rows copied in case that a turn fails"] > 4
    assert counts["rounds of rows with inputs"] > 2
