"""How the rounds of one step are launched: together where possible, with the same result as one by one."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from checks import check_books, check_rounds, check_row
from memory import BUDGET, INTERVAL, RECENT
from running import Running
from sglang_triattn.patches.request import compressed as requests_patch
from sglang_triattn.patches.rounds.launches import width_for
from sglang_triattn.patches.scheduler.disaggregation import _back_up
from sglang_triattn.request.options import CompressionOptions
from simulation import Simulation


class Stream:
    """A stream that records whom it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")


class Forward:
    """The context of the forward stream, which can be entered repeatedly."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def __enter__(self) -> None:
        self._log.append("enter forward")

    def __exit__(self, *_: object) -> None:
        self._log.append("leave forward")


def watch(sim: Simulation) -> list[str]:
    """Gives the simulation's scheduler streams; records in order what rounds do with them, the scorer and the pool."""
    log: list[str] = []
    scheduler = sim.compressor._scheduler
    scheduler.enable_overlap = True
    scheduler.forward_stream, scheduler.schedule_stream = Stream("forward", log), Stream("schedule", log)
    scheduler.forward_stream_ctx = Forward(log)
    log_calls(sim.compressor._scorer, "in_turn", "score", log)
    release = "_release_page_ids" if sim.page_size > 1 else "free"
    log_calls(sim.allocator, release, "free", log)
    return log


def log_calls(owner: object, name: str, shown: str, log: list[str]) -> None:
    call = getattr(owner, name)

    def logged(*args, **kwargs):
        log.append(shown)
        return call(*args, **kwargs)

    setattr(owner, name, logged)


def launches(sim: Simulation) -> list[tuple[int, int]]:
    """Records [rows, num_tokens] of every launch of the scorer from here on."""
    seen: list[tuple[int, int]] = []
    in_turn = sim.compressor._scorer.in_turn

    def logged(slots, *args, **kwargs):
        seen.append(tuple(slots.shape))
        return in_turn(slots, *args, **kwargs)

    sim.compressor._scorer.in_turn = logged
    return seen


def at_trigger(sim: Simulation, frozen: list[int]) -> list[Running]:
    """Requests with these numbers of frozen tokens, all due in the next step."""
    running = []
    for number, length in enumerate(frozen):
        request = sim.request([*[5] * (length - 1), 6 + number])
        assert sim.admit(request, 1000)
        decode_until_due(sim, request)
        running.append(request)
    return running


def decode_until_due(sim: Simulation, request: Running) -> None:
    settings = requests_patch.settings_of(request.req)
    frozen = requests_patch.frozen_of(request.req, settings, sim.page_size)
    while request.req.kv.kv_allocated_len < frozen + settings.trigger(frozen):
        assert sim.decode(request)


@pytest.mark.parametrize("selection", ["union", "per-head"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_each_stream_waits_once_and_slots_are_freed_once(page_size, selection):
    """Prevents rounds that queue one after another: each wait is a gap on the GPU, each free copies the free list."""
    sim = Simulation(page_size, selection=selection, budget_scope="total")
    at_trigger(sim, [3, 5, 8])
    log = watch(sim)
    sim.compress()
    moved = page_size > 1 or selection == "per-head"
    frozen = {requests_patch.frozen_of(running.req, sim.config, page_size) for running in sim.running}
    assert len(frozen) > 1
    scoring = ["forward waits for schedule", "enter forward", *["score"] * len(frozen), "leave forward"]
    assert log == [*scoring, *([] if moved else ["schedule waits for forward"]), "free"]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_decode_server_copies_rows_after_their_rounds(page_size):
    """Prevents a backup of a request that is retracted in the step of its round from holding evicted tokens' K/V: it is
    copied on a stream that waits for the schedule stream, while a round moves K/V on the forward stream."""
    sim = Simulation(page_size, selection="per-head", decodes_alone=True)
    (running,) = at_trigger(sim, [3])
    log = watch(sim)
    sim.compress()
    assert running.evicted
    assert _back_up(lambda *_: log.append("back up") is None, running.req, "host_pool")
    moved = log.index("leave forward")
    assert log[moved:] == ["leave forward", "schedule waits for forward", "free", "back up"]


@pytest.mark.parametrize("recent", [0, RECENT])
@pytest.mark.parametrize("selection", ["union", "per-head"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_rounds_of_a_decode_server_leave_the_newest_token_last(page_size, selection, recent):
    """Prevents a request that is retracted in the step of its round from ending, or from losing a token that the round
    has kept: SGLang copies all entries of the row but the last, and computes the newest token again."""
    sim = Simulation(page_size, selection=selection, recent=recent, decodes_alone=True)
    (running,) = at_trigger(sim, [3])
    newest = running.positions[..., -1]
    check_rounds(sim)
    assert running.evicted
    assert torch.equal(running.positions[..., -1], newest)


def test_rounds_that_keep_as_many_tokens_share_a_launch():
    """Prevents a separate launch for each length of a shared prefix."""
    sim = Simulation(1)
    at_trigger(sim, [3, 5, 8, 20])
    seen = launches(sim)
    sim.compress()
    assert seen == [(4, BUDGET + INTERVAL)]


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_long_row_does_not_widen_the_others(page_size):
    """Prevents one long prompt from padding every row of its step to its own width."""
    sim = Simulation(page_size, prompt="compact")
    wide = sim.request([7] * 110)
    assert sim.admit(wide, 1000)
    narrow = at_trigger(sim, [3, 4, 5])
    first = [requests_patch.frozen_of(running.req, sim.config, page_size) for running in (wide, *narrow)]
    seen = launches(sim)
    check_rounds(sim)
    assert len({width_for(num_tokens) for _, num_tokens in seen}) == len(seen) == 2
    lengths = 110 - first[0], max(BUDGET + INTERVAL for _ in narrow)
    assert seen == [(1, lengths[0]), (3, lengths[1])]
    for running in (wide, *narrow):
        check_row(sim, running)


@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 2048, 2049, 4096])
def test_rows_are_padded_to_twice_their_length_at_most(length):
    """Prevents groups so wide that rows are mostly padding, or so narrow that every length is a launch."""
    assert length <= width_for(length) < 2 * length
    assert width_for(width_for(length)) == width_for(length)


SETTINGS = [
    {"selection": "union"},
    {"selection": "shared-mean", "budget_scope": "total"},
    {"selection": "per-head", "budget_scope": "total"},
    {"selection": "per-layer-head", "recent": 9},
]


def mixed_requests(sim: Simulation) -> list[Running]:
    """Requests that differ in width and in how many tokens are frozen, kept and recent; all due in the next step."""
    shapes = [([7] * 60, {"prompt": "compact"}), ([5] * 6, {}), ([5] * 9, {"budget": 11}), ([6] * 3, {"recent": 2})]
    running = []
    for tokens, asked in shapes:
        request = sim.request(tokens)
        requests_patch.attach_options(request.req, CompressionOptions(dataclasses.replace(sim.config, **asked)))
        assert sim.admit(request, 1000)
        decode_until_due(sim, request)
        running.append(request)
    return running


def one_by_one(sim: Simulation) -> None:
    everyone = sim.running
    for running in everyone:
        sim.running = [running]
        sim.compress()
    sim.running = everyone


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())))
def test_rounds_together_keep_what_rounds_one_by_one_keep(page_size, settings):
    """Prevents a row, a kept set or moved K/V from depending on who else has a round in the same step."""
    together, alone = Simulation(page_size, **settings), Simulation(page_size, **settings)
    requests = [mixed_requests(sim) for sim in (together, alone)]
    seen, counts = launches(together), []
    for _ in range(30):
        before = len(seen)
        together.compress()
        one_by_one(alone)
        counts.append(len(seen) - before)
        for one, other in zip(*requests, strict=True):
            same_row(together, one, alone, other)
        for sim, running in zip((together, alone), requests, strict=True):
            check_books(sim)
            assert all(sim.decode(request) for request in running)
    assert counts[0] > 2
    assert together.rounds == alone.rounds > 8


def same_row(sim: Simulation, one: Running, other_sim: Simulation, other: Running) -> None:
    """Both rows hold the same bytes in the same order and, in the first rounds, the same slots."""
    rows = sim.row(one), other_sim.row(other)
    assert torch.equal(sim.content(rows[0]), other_sim.content(rows[1]))
    records = [requests_patch.compression_of(running.req).record for running in (one, other)]
    assert records[0].exact_prefix_len() == records[1].exact_prefix_len()
    assert records[0].unordered_len == records[1].unordered_len


def test_rows_are_equal_slot_by_slot():
    """Prevents the same for the slots themselves: the first rounds find the same free list on both sides."""
    together, alone = Simulation(1, budget_scope="total"), Simulation(1, budget_scope="total")
    requests = [at_trigger(sim, [3, 5, 8]) for sim in (together, alone)]
    together.compress()
    one_by_one(alone)
    assert together.rounds == alone.rounds == 3
    for one, other in zip(*requests, strict=True):
        assert torch.equal(together.row(one), alone.row(other))
    assert sorted(together.allocator.free_pages.tolist()) == sorted(alone.allocator.free_pages.tolist())
