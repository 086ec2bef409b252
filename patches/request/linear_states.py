"""Layers that keep a state instead of KV (linear attention, short convolutions): whose it is, and where it goes.

SGLang parts: `HybridReqToTokenPool` (sglang/srt/mem_cache/memory_pool.py), `MambaComponent` of the tree
(sglang/srt/mem_cache/unified_cache/components/mamba.py), `SchedulerBatchResultProcessor`
(sglang/srt/managers/scheduler_components/batch_result_processor.py).

A request's state takes one slot of its own pool at any length of its row, and rounds do not change it. It has seen
every token, evicted ones too, and cannot be shortened to fewer. So the tree gets states of prompts, which SGLang copies
while a request prefills, and of answers from which nothing was evicted.

With overlap, SGLang also copies the state of a decoding request (`extra_buffer`) whenever the length of its row is a
multiple of an interval, and records the row's length as that of the text. After the first eviction the two differ, so
nothing is recorded and the copy is not used. With `extra_buffer_lazy` the step that copies takes a slot for it, and
what processes its result frees the slot of the copy before.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import torch

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.compressed import evicted_of
from sglang_triattn.patches.request.integrity import give_back

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
    from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool

    from sglang_triattn.patches.sglang_types import Scheduler


def hooks() -> list[Hook]:
    target = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    parameters = "self req batch result i known_boundary"
    return [
        Hook(
            f"{target}._mamba_prefix_cache_update",
            "around",
            _note_whole_texts,
            parameters,
            why="notes no copy of a state as that of a text of which something is evicted",
        )
    ]


def _note_whole_texts(
    original: Callable,
    processor: SchedulerBatchResultProcessor,
    req: Req,
    batch: ScheduleBatch,
    result: object,
    i: int,
    **options: object,
) -> None:
    if not evicted_of(req):
        original(processor, req, batch, result, i, **options)
    elif (places := _places_on_demand(batch)) and req.kv.mamba_ping_pong_track_buffer is not None:
        # The step had a slot for a copy, next to that of the copy before. One of the two is given back.
        req.kv.mamba_last_track_seqlen = None
        processor.mamba_lazy_post_decode_at_boundary(req, batch, places[i])


def _places_on_demand(batch: ScheduleBatch) -> list[int]:
    """Which of its two slots each request of a step copies its state to, where it has the second only for that
    (`extra_buffer_lazy`); otherwise empty, as with drafts, where a request keeps it for the next copy."""
    from sglang.srt.runtime_context import get_exec

    lazy = get_exec().mamba.enable_mamba_extra_buffer_lazy
    return batch.mamba_track_buffer_indices or [] if lazy and batch.spec_algorithm.is_none() else []


def seen_by_state(request: Req) -> int:
    """Tokens that the state of a request has seen, if it has one.

    With overlap that may be one more than its answer needs.
    """
    return request.kv.kv_committed_len + evicted_of(request)


def drop_looked_up(scheduler: Scheduler, kv: ReqKvInfo) -> None:
    """Frees the state into which looking up a prompt would have copied what the tree found."""
    if kv.mamba_pool_idx is not None:
        rows = cast("HybridReqToTokenPool", scheduler.req_to_token_pool)
        rows.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        kv.mamba_pool_idx = kv.mamba_cow_src_index = None


def free_state(scheduler: Scheduler, kv: ReqKvInfo) -> None:
    """Frees the state of a row that no request holds, by SGLang's record of it; the row itself is still taken."""
    if kv.holds_mamba:
        rows = cast("HybridReqToTokenPool", scheduler.req_to_token_pool)
        # It looks at nothing else of its argument.
        rows.free_mamba_cache(cast("Req", SimpleNamespace(kv=kv)))


def can_copy_state(scheduler: Scheduler, kv: ReqKvInfo) -> bool:
    """Whether there is memory for a second state like that of a row; true for a row without a state."""
    if not kv.holds_mamba:
        return True
    rows = cast("HybridReqToTokenPool", scheduler.req_to_token_pool)
    return rows.mamba_allocator.available_size() > rows.mamba_initial_tracking_slots


def copy_state(scheduler: Scheduler, kv: ReqKvInfo, copied: ReqKvInfo, undo: ExitStack) -> Callable[[], None]:
    """Gives `copied`, a row like `kv`, memory for a state of its own; returns what copies the state.

    Args:
        undo: gives the memory back.
    """
    if not kv.holds_mamba:
        return lambda: None
    rows = cast("HybridReqToTokenPool", scheduler.req_to_token_pool)
    copied.mamba_pool_idx = copied.mamba_ping_pong_track_buffer = None
    copied.mamba_ping_pong_empty = [True] * rows.mamba_ping_pong_track_buffer_size
    [copied.mamba_pool_idx] = cast("torch.Tensor", rows.mamba_allocator.alloc(1))
    undo.callback(give_back, "the copy of a state was given up", free_state, scheduler, copied)
    rows.req_index_to_mamba_index_mapping[copied.req_pool_idx] = copied.mamba_pool_idx.to(torch.int32)
    if rows.enable_mamba_extra_buffer:
        rows._alloc_ping_pong_buffer(cast("Req", SimpleNamespace(kv=copied)))
        buffers = rows.req_index_to_mamba_ping_pong_track_buffer_mapping
        buffers[copied.req_pool_idx] = cast("torch.Tensor", copied.mamba_ping_pong_track_buffer)
    source, target = (cast("torch.Tensor", each.mamba_pool_idx).unsqueeze(0) for each in (kv, copied))
    return lambda: rows.mamba_pool.copy_from(source, target)
