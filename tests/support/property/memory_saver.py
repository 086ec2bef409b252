"""SGLang's own flush and memory saver on the simulation: what is reset, what is unmapped, and in which order."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from simulation import Simulation


class Unmapped(torch.Tensor):
    """Memory that is unmapped: every access ends the run, as it ends a process on a GPU."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        raise AssertionError(f"unmapped memory was accessed by {function.__name__}")


class MemorySaver:
    """Takes the place of SGLang's adapter; `tensors` are what SGLang allocates in the region that it calls kv_cache."""

    def __init__(self, sim: Simulation) -> None:
        self.tensors = [sim.rows.req_to_token, *sim.pool.k_buffer, *sim.pool.v_buffer]

    def pause(self, tag: str) -> None:
        assert tag == "kv_cache"
        for tensor in self.tensors:
            tensor.__class__ = Unmapped

    def resume(self, *, lost: bool) -> None:
        """Maps the memory again; if `lost`, with arbitrary content."""
        for tensor in self.tensors:
            tensor.__class__ = torch.Tensor
            if lost:
                tensor.fill_(-77)


def flush(sim: Simulation, *, granted: bool) -> bool:
    """SGLang's `Scheduler.flush_cache` with this package's hook; returns whether it flushed.

    Args:
        granted: what SGLang finds when it checks whether the server is idle.
    """
    scheduler = SimpleNamespace(
        is_fully_idle=lambda ignore_waiting=False: granted,
        # A paused server flushes although requests are queued; these hold no rows.
        _engine_paused=True,
        tree_cache=sim.tree,
        req_to_token_pool=sim.rows,
        token_to_kv_pool_allocator=sim.allocator,
        grammar_manager=SimpleNamespace(clear=lambda: None),
        metrics_reporter=SimpleNamespace(reset_metrics=lambda: None, is_stats_logging_rank=False),
        draft_worker=None,
        waiting_queue=sim.waiting,
        running_batch=SimpleNamespace(reqs=sim.running),
    )
    return hooked(sim, Scheduler.flush_cache)(scheduler, empty_cache=False)


def hooked(sim: Simulation, function: Any) -> Any:
    """A method of SGLang with the hook of the simulation's conversations applied."""
    (hook,) = [hook for hook in sim.conversations.hooks() if hook.target.endswith("." + function.__qualname__)]

    def call(*args: Any, **kwargs: Any) -> Any:
        if hook.kind == "before":
            hook.function(*args, **kwargs)
        result = function(*args, **kwargs)
        if hook.kind == "after":
            hook.function(result, *args, **kwargs)
        return result

    return call


def release_memory(sim: Simulation, *, granted: bool) -> bool:
    """SGLang's `release_memory_occupation` and the return; returns whether it flushed."""
    saver, flushed = MemorySaver(sim), []
    updater = SimpleNamespace(
        is_fully_idle=lambda ignore_waiting=False: True,
        scheduler=None,
        offload_tags=set(),
        memory_saver_adapter=saver,
        flush_cache=lambda: flushed.append(flush(sim, granted=granted)),
    )
    try:
        asked = ReleaseMemoryOccupationReqInput(tags=["kv_cache"])
        # Its last line waits for the device, which a machine without one cannot do.
        with patch.object(torch, "get_device_module", lambda: torch.cpu):
            SchedulerWeightUpdaterManager.release_memory_occupation(updater, asked)
        # The next step looks for rows while nothing is mapped.
        sim.conversations.make_rows([running.req for running in sim.waiting] if granted else [])
    finally:
        saver.resume(lost=granted)
    return flushed == [True]
