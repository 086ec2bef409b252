"""Random histories in which rounds fail at every step: no slot lost, no row half done, nothing poisoned."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from checks import check_books, check_row, decode_together
from failing import ROUND_STEPS, TALK_STEPS, Fault, Injected, failed, step_with
from histories import CHUNKS, STEMS, TOKENS, Histories, run_histories
from sets import wide
from sglang_triattn.census import IntegrityError
from sglang_triattn.patches.scheduler.circuit_breaker import LIMIT
from simulation import Simulation


class FailingHistories(Histories):
    """Histories in which a step of a round, or of a conversation, raises now and then."""

    def _settle(self, ended, overrun):
        for running in ended:
            found = self.sim.matched(running.tokens)
            self.sim.release(running, finish=True, abort=True, overrun=overrun)
            assert self.sim.matched(running.tokens) == found, "the tree took K/V of a failed request"

    def _count(self, step, fault, ended):
        if fault.raised:
            self.counts[step] += 1
            self.counts["ended"] += ended

    @precondition(lambda self: self.sim.running)
    @rule(
        step=st.sampled_from(sorted(ROUND_STEPS)),
        call=st.sampled_from([1, 1, 1, 2, 3]),
        late=st.booleans(),
        overrun=st.booleans(),
        forgive=st.booleans(),
    )
    def failing_round(self, step, call, late, overrun, forgive):
        for _ in range(20):
            fault = Fault(ROUND_STEPS, step, call, late)
            ended = step_with(self.sim, fault)
            self._count(step, fault, len(ended))
            self._settle(ended, overrun)
            if fault.raised or not self.sim.running:
                break
            check_books(self.sim)
            for running in list(self.sim.running):
                if not self.sim.decode(running):
                    self.sim.release(running, finish=True)
        if forgive:
            self.sim.compressor.breaker.succeeded()

    @rule(
        stem=st.sampled_from(STEMS),
        tail=st.lists(TOKENS, max_size=6),
        chunk=CHUNKS,
        step=st.sampled_from(sorted(ROUND_STEPS)),
        late=st.booleans(),
    )
    def failing_prefill(self, stem, tail, chunk, step, late):
        running = self.sim.request([*stem, *tail, 8])
        fault, ended = Fault(ROUND_STEPS, step, 1, late), []

        def between_chunks(chunked):
            ended.extend(step_with(self.sim, Fault(ROUND_STEPS, step, 2, late) if fault.raised else fault, chunked))
            self._settle(ended, False)
            ended.clear()

        chunk = max(chunk - chunk % self.sim.page_size, self.sim.page_size)
        self.sim.admit(running, chunk, between_chunks)
        self._count(step, fault, failed(running))
        self.sim.compressor.breaker.succeeded()

    @rule(
        name=st.sampled_from("ab"),
        step=st.sampled_from(sorted(TALK_STEPS)),
        late=st.booleans(),
        tail=st.lists(TOKENS, min_size=1, max_size=3),
        steps=st.integers(8, 30),
    )
    def failing_talk(self, name, step, late, tail, steps):
        # A reserve makes sure that something is freed there; a failure after it ends the server.
        late = late and not (self.sim.reserve and step == "leave the tail")
        spoken = self.sim.spoken.get(name, [])
        turn = self.sim.request([*(spoken if len(spoken) < 110 else [7] * 3), *tail], conversation=name)
        fault = Fault(TALK_STEPS, step, 1, late)
        with fault.planted():
            admitted = self._admit(turn, 1000)
        if admitted:
            self.decode(steps)
        if turn in self.sim.running:
            ending = Fault(TALK_STEPS, step, 1, late) if not fault.raised else fault
            with ending.planted():
                self.sim.release(turn, finish=True)
            fault.raised |= ending.raised
        self._count(step, fault, 0)


def run(examples: int, **options) -> Counter:
    return run_histories(examples, histories=FailingHistories, **options)


def test_random_failures_under_random_settings():
    """Prevents a failed round from losing slots, leaving a row half done, or giving the tree what it moved."""
    counts = run(30, varied=True)
    # `test_each_step` makes sure of every one.
    assert len({*ROUND_STEPS, *TALK_STEPS} & set(+counts)) > 9, f"too few steps failed: {counts}"
    assert counts["ended"] > 3


@pytest.mark.parametrize("page_size", [wide(1), 4])
def test_random_failures_with_two_pools(page_size):
    """Prevents the same where window layers have a KV pool of their own, whose cursor must follow the row."""
    lengths = {"budget": 24, "interval": 8, "recent": 14, "pressure_budget": 20, "window": 10}
    counts = run(24, page_size=page_size, **lengths)
    assert counts["windows"] + counts["move"] + counts["settle"] > 0


def test_random_failures_of_drafting_requests():
    """Prevents reserves from staying where a failed round has put them, and from moving without their row."""
    counts = run(10, page_size=4, reserve=10)
    assert sum(counts[step] for step in ROUND_STEPS) > 5, counts


def compacted(**options) -> tuple[Simulation, list]:
    """Two requests that have had rounds, whose next rounds are due in the same step."""
    sim = Simulation(1, **options)
    pair = [sim.request([5] * 20), sim.request([7] * 3)]
    for running in pair:
        assert sim.admit(running, 1000)
    while not all(running.evicted for running in pair):
        decode_together(sim, pair, 1)
    return sim, pair


def until_it_fails(sim: Simulation, step: str, *, late: bool = False) -> list:
    fault = Fault(ROUND_STEPS, step, 1, late)
    for _ in range(60):
        ended = step_with(sim, fault)
        if fault.raised:
            return ended
        for running in sim.running:
            assert sim.decode(running)
    raise AssertionError(f"{step} was never reached")


@pytest.mark.parametrize("selection", ["shared-mean", "per-layer-head"])
@pytest.mark.parametrize("step", ["close up", "emptied", "free", "settle"])
def test_reserves_stay_with_their_rows(step, selection):
    """Prevents slots for drafted tokens from being lost or held twice once rows have been rewritten."""
    sim, _ = compacted(selection=selection, reserve=10)
    for running in until_it_fails(sim, step, late=True):
        sim.release(running, finish=True, abort=True)
    check_books(sim)
    for running in sim.running:
        check_row(sim, running)


@pytest.mark.parametrize("selection", ["shared-mean", "per-layer-head"])
@pytest.mark.parametrize("step", sorted({*ROUND_STEPS} - {"windows", "early plan"}))
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_each_step(step, late, selection):
    """Prevents a failure from costing requests that have lost nothing, and from sparing those that have."""
    moves = selection == "per-layer-head"
    if step in ({"permute"} if moves else {"move", "list moves"}):
        pytest.skip("rounds of this selection have no such step")
    sim, _ = compacted(selection=selection)
    rounds = sim.rounds
    ended = until_it_fails(sim, step, late=late)
    if step in ("settle", "record", "lifecycle") or (step == "free" and late):
        # The slots are free. Who has no record ends: all, or those after the first.
        first_recorded = late and step in ("record", "lifecycle")
        assert len(ended) == 2 - first_recorded
    else:
        lost = step in {"list moves", "move", "positions", "close up", "emptied", "free"}
        assert bool(ended) == (lost and moves), f"{len(ended)} requests ended"
    for running in ended:
        sim.release(running, finish=True, abort=True)
    check_books(sim)
    # What goes on has its round the next time.
    left = list(sim.running)
    if left:
        decode_together(sim, left, 12)
        assert sim.rounds > rounds
    assert sim.compressor.totals.failed_rounds > 0
    assert sim.compressor.breaker.reason is None


def test_failures_in_a_row_stop_compression():
    """Prevents a server whose rounds always fail from trying forever, and requests from outgrowing their memory."""
    sim, pair = compacted()
    for number in range(LIMIT):
        assert sim.compressor.breaker.reason is None
        ended = until_it_fails(sim, "score")
        assert bool(ended) == (number == LIMIT - 1), "requests end only once compression has stopped"
    assert "(Injected: planted)" in sim.compressor.breaker.reason
    others = [running for running in pair if running not in ended]
    for running in ended:
        sim.release(running, finish=True, abort=True)
    check_books(sim)
    decode_together(sim, others, 20)


def test_a_success_between_failures():
    """Prevents failures with hours between them from adding up."""
    sim, _ = compacted()
    for _ in range(2 * LIMIT):
        until_it_fails(sim, "snapshot")
        sim.compress()
    assert sim.compressor.breaker.reason is None


def test_what_ends_the_server():
    """Prevents serving on with books that do not balance, and ranks from going separate ways."""
    sim, _ = compacted()
    real = sim.allocator.free_page_ids

    def frees_and_fails(pages):
        real(pages)
        raise Injected("planted")

    sim.allocator.free_page_ids = frees_and_fails
    with pytest.raises(IntegrityError, match="slots were freed by a call that failed"):
        until_it_fails(sim, "record")
    sim, _ = compacted()
    sim.compressor._scheduler.tp_group = SimpleNamespace(world_size=2)
    with pytest.raises(Injected):
        until_it_fails(sim, "score")
