"""Pipeline parallelism: a scheduler, a KV pool and a tree for each stage, which holds some of the layers.

SGLang part: `SchedulerPPMixin.event_loop_pp` (sglang/srt/managers/scheduler_pp_mixin.py). Every stage takes the same
requests in the same order and comes to the same batches, without asking the others: token counts decide, and so they do
for rounds. A stage reaches the safe point of a microbatch once it has the results of that microbatch's last step, so no
stage is still computing it. Only a prefill continues, in the next microbatch, while its last chunk is computed; each
stage then has its rounds between the same chunks, on the stream that runs them.

Each stage chooses what its own layers keep. One choice for all would make the first stage wait for the last.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeVar

from sglang_triattn.kernels.select import selection_named

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler

T = TypeVar("T")


def is_staged(scheduler: Scheduler) -> bool:
    """Whether other stages hold layers of the model."""
    return scheduler.pp_group.world_size > 1


def has_forward_stream(scheduler: Scheduler) -> bool:
    """Whether forward passes run on a stream of their own (`Scheduler.run_batch`, `_pp_launch_batch`)."""
    return scheduler.enable_overlap or is_staged(scheduler)


def after_queued_step(scheduler: Scheduler, *borrowed: torch.Tensor) -> AbstractContextManager:
    """Context in which work is enqueued after the queued step; `borrowed` tensors stay allocated for it."""
    if not has_forward_stream(scheduler):
        return nullcontext()
    scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
    lend(scheduler.forward_stream, *borrowed)
    return scheduler.forward_stream_ctx


def lend(stream: torch.Stream, *tensors: torch.Tensor) -> None:
    """Keeps the memory of tensors of another stream until what is enqueued on `stream` now has run."""
    for tensor in tensors:
        if tensor.is_cuda:
            tensor.record_stream(stream)


def keeps_equal_sets(scheduler: Scheduler, selection: str) -> bool:
    """Whether every rank of every stage keeps the same tokens, so that all may give the tree the same part of a row."""
    return not is_staged(scheduler) and (selection_named(selection).shared or scheduler.dp_tp_group.world_size == 1)


def is_first(scheduler: Scheduler) -> bool:
    """Whether this is the first tensor-parallel rank of the first stage."""
    return scheduler.tp_group.rank_in_group == 0 and scheduler.pp_group.rank_in_group == 0


def broadcast_from_first_rank(scheduler: Scheduler, value: T) -> T:
    """What the first rank of the first stage gives; every rank of every stage calls this."""
    return scheduler.tp_group.broadcast_object(scheduler.pp_group.broadcast_object(value))


def from_last_stage(scheduler: Scheduler, value: T) -> T:
    """What the first rank of the last stage gives; every rank of every stage calls this."""
    stages, ranks = scheduler.pp_group, scheduler.tp_group
    return stages.broadcast_object(ranks.broadcast_object(value), src=stages.world_size - 1)


def running_batches(scheduler: Scheduler) -> list[ScheduleBatch]:
    """The running batches of all microbatches; without stages there is one."""
    # Stages have them once their loop has begun.
    return getattr(scheduler, "running_mbs", None) or [scheduler.running_batch]


def batches_in_flight(scheduler: Scheduler) -> list[ScheduleBatch]:
    """Batches of the other microbatches that have been launched and whose results this stage does not know yet."""
    pairs = zip(getattr(scheduler, "running_mbs", ()), getattr(scheduler, "mbs", ()), strict=True)
    return [batch for running, batch in pairs if batch is not None and running is not scheduler.running_batch]


def requests_of_other_batches(scheduler: Scheduler) -> list[Req]:
    """Requests of the other microbatches that hold a row, those whose prefill has further chunks left out."""
    others = [batch for batch in running_batches(scheduler) if batch is not scheduler.running_batch]
    found = {id(req): req for batch in (*others, *batches_in_flight(scheduler)) for req in batch.reqs}
    return [
        request
        for request in found.values()
        if request is not scheduler.chunked_req and request.kv.holds_kv and not request.finished()
    ]
