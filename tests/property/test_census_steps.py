"""The census in the course of a server's steps: queued steps, rounds, chunked prefills, beams."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.beam_search.beam_group import BeamGroup
from sglang.srt.beam_search.fork import StagedOrphans, alias_members_prompt_kv
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from scene import Scene
from sglang_triattn.census import IntegrityError
from sglang_triattn.patches.rounds.compressor import Compressor
from simulation import Simulation
from whole_server import census_of, fault_of, server_of


def queued_step(scene, *runnings) -> SimpleNamespace:
    """A decode step of these requests as in SGLang's result queue, each request one token ahead of its result."""
    for running in runnings:
        assert scene.sim.decode(running)
        running.req.output_ids.pop()
    rows = [running.req.kv.req_pool_idx for running in runnings]
    newest = [running.req.kv.kv_allocated_len - 1 for running in runnings]
    return SimpleNamespace(
        reqs=[running.req for running in runnings],
        forward_mode=ForwardMode.DECODE,
        req_pool_indices_cpu=torch.tensor(rows),
        out_cache_loc=scene.sim.rows.req_to_token[rows, newest],
    )


def test_a_queued_step():
    """Prevents a step in flight from writing to a slot that is free or somebody else's."""
    scene = Scene(1)
    step = queued_step(scene, scene.first, scene.second)
    scheduler = server_of(scene.sim)
    assert "but computed" in fault_of(scheduler, scene.sim)
    scheduler.result_queue = [(step, None)]
    assert fault_of(scheduler, scene.sim) is None
    own = step.out_cache_loc.clone()
    step.out_cache_loc[0] = own[1]
    prefix = f"slot {own[1]}, which a queued step writes for request r2, "
    assert fault_of(scheduler, scene.sim) == f"{prefix}belongs to request r3"
    step.out_cache_loc[0] = scene.sim.allocator.free_pages[3]
    prefix = f"slot {step.out_cache_loc[0]}, which a queued step writes for request r2, "
    assert fault_of(scheduler, scene.sim) == f"{prefix}is free"
    step.out_cache_loc[0] = scene.row[0]
    assert fault_of(scheduler, scene.sim).endswith("writes for request r2, belongs to the tree")
    step.out_cache_loc[0] = 5000
    assert fault_of(scheduler, scene.sim).endswith("writes for request r2, does not exist")
    # A request that has ended owns nothing, though the step queued earlier still writes.
    step.out_cache_loc = own
    scene.sim.release(scene.first, finish=True)
    scheduler = server_of(scene.sim)
    scheduler.result_queue = [(step, None)]
    assert fault_of(scheduler, scene.sim) is None


def due_rounds(scene):
    """The scene's scheduler, one step ahead of the round that is due for its requests, and its census."""
    while scene.sim.config.interval > scene.kv.kv_allocated_len - 20 - scene.sim.config.budget:
        # A server looks for due rounds before each step.
        scene.sim.compress()
        assert scene.sim.decode(scene.first)
        assert scene.sim.decode(scene.second)
    scheduler = server_of(scene.sim)
    return scheduler, census_of(scene.sim, scheduler)


def run_step(scene, scheduler, census) -> None:
    """Runs the rounds of a step as the scheduler's hook does."""
    around = census.around_rounds(scheduler.running_batch, None)
    scene.sim.compressor.run_due_rounds(scheduler.running_batch, around=around)


@pytest.mark.parametrize("page_size", [1, 4])
def test_before_and_after_rounds(page_size, monkeypatch):
    """Prevents a round that frees one token too many or runs on wrong books, and a census that is never taken."""
    scene = Scene(page_size)
    run_step(scene, *due_rounds(scene))
    record = Compressor._record

    def record_too_much(self, request, plan, *rest):
        record(self, request, plan, *rest)
        scene.free(scene.sim.rows.req_to_token[request.kv.req_pool_idx, 20])

    due = due_rounds(scene)
    with monkeypatch.context() as broken:
        broken.setattr(Compressor, "_record", record_too_much)
        with pytest.raises(IntegrityError) as caught:
            run_step(scene, *due)
    place = scene.place(scene.row[20])
    assert str(caught.value).startswith(f"Integrity: after the rounds of step 412, {place} belongs to request r")
    # Nothing runs on books that are already wrong.
    due, rounds = due_rounds(scene), scene.sim.rounds
    with pytest.raises(IntegrityError, match="Integrity: before the rounds of step 412, "):
        run_step(scene, *due)
    assert scene.sim.rounds == rounds


def test_a_step_without_rounds_is_not_looked_at():
    """Prevents waiting for the device at every step, although only rounds can have corrupted anything."""
    scene = Scene(1)
    scheduler, census = due_rounds(scene)
    run_step(scene, scheduler, census)
    scene.free(scene.row[20])
    run_step(scene, server_of(scene.sim), census)
    with pytest.raises(IntegrityError, match="idle after step 412"):
        census.on_idle(server_of(scene.sim))


def test_a_round_may_free_what_a_queued_step_writes():
    """Prevents a false alarm: a page emptied by a round is freed after the step queued on the same stream."""
    scene = Scene(4)
    while scene.sim.config.interval - 1 > scene.kv.kv_allocated_len - 20 - scene.sim.config.budget:
        scene.sim.compress()
        assert scene.sim.decode(scene.first)
    step = queued_step(scene, scene.first)
    scheduler = server_of(scene.sim)
    scheduler.result_queue = [(step, None)]
    run_step(scene, scheduler, census_of(scene.sim, scheduler))
    assert step.out_cache_loc[0] // 4 in scene.sim.allocator.get_all_free_pages()


def test_prefill_in_chunks():
    """Prevents the rows of half-computed prompts, in the batch or waiting, from being left out."""
    sim = Simulation(1, prompt="compact")
    seen = []

    def between_chunks(running):
        req = running.req
        scheduler = server_of(sim)
        assert "has no owner" in fault_of(scheduler, sim)
        scheduler.chunked_req = req
        assert fault_of(scheduler, sim) is None
        scheduler.waiting_queue = [req]
        assert fault_of(scheduler, sim) is None
        # Before a round between the chunks the row was longer; this entry has been removed, not merged.
        old = torch.tensor([req.kv.kv_allocated_len + 5])
        scheduler.last_batch = SimpleNamespace(reqs=[req], seq_lens=old, seq_lens_cpu=old, chunked_req=None)
        assert fault_of(scheduler, sim) is None
        req.extend_end += 1
        assert fault_of(scheduler, sim) == (
            f"request r1 has {req.kv.kv_allocated_len} entries in row {req.kv.req_pool_idx}, "
            f"but is prefilled to {req.extend_end}"
        )
        req.extend_end -= 1
        seen.append(req.rid)

    assert sim.admit(sim.request([5] * 50), 20, between_chunks)
    assert seen == ["r1", "r1"]


def test_beams():
    """Prevents slots that beams share from counting as owned twice, and those of a dropped beam as lost."""
    sim = Simulation(1, radix=False)
    leader = sim.request([5] * 10)
    assert sim.admit(leader, 1000)
    kv, table = leader.req.kv, sim.rows.req_to_token
    group = BeamGroup(beam_width=3, max_new_tokens=20)
    group.leader, group.prompt_len, leader.req.beam_group = leader.req, 10, group
    group.member_rows_cpu = group.member_rows = torch.tensor(sim.rows.alloc_rows(2))
    group.all_rows = torch.tensor([kv.req_pool_idx, *group.member_rows.tolist()])
    alias_members_prompt_kv(table, group.member_rows, kv.req_pool_idx, 10)
    # Two steps; then all beams continue from the first, and the others drop their own slots.
    for length in (10, 11):
        table[group.all_rows, length] = sim.allocator.alloc(3).int()
        group.num_generated += 1
    group.num_generated += 1
    kv.kv_allocated_len = kv.kv_committed_len = 12
    assert fault_of(server_of(sim), sim) is None
    old = table[group.all_rows, 10:12].clone()
    table[group.all_rows, 10:12] = old[:1]
    assert "has no owner" in fault_of(server_of(sim), sim)
    group.pending_orphans.append(StagedOrphans(1, old, old[:1].expand(3, -1)))
    assert fault_of(server_of(sim), sim) is None
    sim.allocator.free(old[1:2, 0].long())
    assert fault_of(server_of(sim), sim) == f"slot {old[1, 0]} belongs to request r1 and is free"
