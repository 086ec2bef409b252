"""Idle conversations make way for a prefill: as many as it needs, and no more."""

from __future__ import annotations

import pytest
from sglang.srt.managers.schedule_policy import PrefillAdder

from checks import check_books
from sglang_triattn.patches.request.bounds import growth_of
from sglang_triattn.patches.scheduler.bounded_adder import bounded_adder
from simulation import Simulation

POOL = 320
TALKS = 3


@pytest.fixture(params=[1, 4])
def sim(request):
    """A simulation in which three conversations are idle, each with a compacted row."""
    return talking(Simulation(request.param, pool=POOL))


def talking(sim: Simulation) -> Simulation:
    for number in range(TALKS):
        running = sim.request([number + 1] * 9, f"talk {number}")
        assert sim.admit(running, 1000)
        for _ in range(30):
            sim.compress()
            assert sim.decode(running)
        sim.release(running, finish=True)
    assert sim.conversations.parked == TALKS
    return sim


def adder_of(sim: Simulation):
    """SGLang's adder with the package's reservation, before its first request of a pass."""
    settings = {"running_batch": None, "new_token_ratio": 1.0, "rem_input_tokens": 10_000, "rem_chunk_tokens": None}
    cls = bounded_adder(PrefillAdder, sim.conversations)
    return cls(sim.page_size, sim.tree, sim.allocator, **settings)


@pytest.mark.parametrize("dropped", range(TALKS + 1))
def test_a_chunk_drops_as_few_rows_as_it_needs(sim, dropped):
    """Prevents a chunk from dropping a conversation that it could leave, or from finding a slot too few."""
    rooms = [adder_of(sim).cur_rem_tokens - sim.page_size]
    for _ in range(dropped):
        sim.conversations.drop_one()
        rooms.append(adder_of(sim).cur_rem_tokens - sim.page_size)
    again = talking(Simulation(sim.page_size, pool=POOL))
    adder = adder_of(again)
    adder._make_room(rooms[-2] + 1 if dropped else rooms[0])
    assert TALKS - again.conversations.parked == dropped
    check_books(again)
    adder._make_room(rooms[-1])
    assert TALKS - again.conversations.parked == dropped


def test_a_chunk_that_nothing_makes_room_for_ends(sim):
    """Prevents a loop without end where all idle rows together are too few."""
    adder_of(sim)._make_room(2 * POOL)
    assert sim.conversations.parked == 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_chunk_finds_room_for_its_windows(page_size):
    """Prevents idle rows from filling the window layers' pool, of which a chunk needs its reach at most."""
    sim = talking(Simulation(page_size, pool=POOL, window=3, selection="per-head"))
    adder, reach = adder_of(sim), sim.conversations.windows.reach
    room = int(adder.memory_budget.remaining_swa) - page_size
    assert room >= reach
    adder._make_window_room(10_000)
    assert sim.conversations.parked == TALKS
    adder.memory_budget.swa_offset += room - reach
    adder._make_window_room(10_000)
    assert sim.conversations.parked == TALKS
    adder.memory_budget.swa_offset += 1
    adder._make_window_room(10_000)
    assert sim.conversations.parked < TALKS
    check_books(sim)


def test_a_request_is_admitted_once_enough_rows_are_gone(sim):
    """Prevents a waiting request that idle rows keep out, and rows that are dropped for one that fits."""
    running = sim.request([7] * 16)
    req = running.req
    sim._next_input(req, sim.tree)
    held = len(req.full_untruncated_fill_ids)
    needed = held + growth_of(req, sim.page_size, held=held)
    adder = adder_of(sim)
    room = int(adder.rem_total_tokens)
    assert needed < room
    for offset, dropped in ((room - needed, 0), (room - needed + sim.page_size, 1)):
        adder.memory_budget.total_offset = offset
        fits, _ = adder._check_prefill_budget(req, total_tokens=0, chunk_limit=None)
        assert fits
        assert TALKS - sim.conversations.parked == dropped
    check_books(sim)
