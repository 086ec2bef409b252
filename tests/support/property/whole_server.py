"""The census on a simulation, through a scheduler that has only what the census reads of SGLang's."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode

from sglang_triattn.census import IntegrityError
from sglang_triattn.patches.observability.census import Census
from simulation import Simulation


def server_of(sim: Simulation) -> SimpleNamespace:
    """The simulation as a scheduler between two steps, with nothing queued."""
    return SimpleNamespace(
        enable_overlap=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: not sim.reserve),
        pp_group=SimpleNamespace(world_size=1),
        disaggregation_mode=DisaggregationMode.NULL,
        forward_ct=412,
        token_to_kv_pool_allocator=sim.allocator,
        req_to_token_pool=sim.rows,
        tree_cache=sim.tree,
        running_batch=batch_of(sim),
        last_batch=None,
        chunked_req=None,
        waiting_queue=[running.req for running in sim.waiting],
        result_queue=[],
    )


def batch_of(sim: Simulation) -> SimpleNamespace:
    held = torch.tensor([running.req.kv.kv_committed_len for running in sim.running])
    return SimpleNamespace(
        batch_is_full=False,
        reqs=[running.req for running in sim.running],
        req_pool_indices=torch.tensor([running.req.kv.req_pool_idx for running in sim.running]),
        seq_lens=held,
        seq_lens_cpu=held.clone(),
        orig_seq_lens=(held + torch.tensor([running.evicted for running in sim.running], dtype=torch.int64)).int(),
    )


def census_of(sim: Simulation, scheduler: SimpleNamespace) -> Census:
    census = Census(sim.conversations)
    census.attach(scheduler)
    return census


def take_census(sim: Simulation) -> None:
    """Raises IntegrityError if the simulation's books are wrong."""
    scheduler = server_of(sim)
    census_of(sim, scheduler).on_idle(scheduler)


def fault_of(scheduler, sim) -> str | None:
    """What an idle census of this scheduler says, without its beginning and end."""
    try:
        census_of(sim, scheduler).on_idle(scheduler)
    except IntegrityError as error:
        return str(error).removeprefix("Integrity: idle after step 412, ").removesuffix(".")
    return None
