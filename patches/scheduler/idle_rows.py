"""The row of an idle conversation: whose turn may reuse it, and how SGLang gets it back.

SGLang parts: the tree lock and slots of a row (`UnifiedRadixCache`), the row table (`ReqToTokenPool`).
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.request.bounds import logical_end
from sglang_triattn.patches.request.compressed import compression_of, settings_in_use, settings_of, tokens_tell_all
from sglang_triattn.patches.request.fields import wants_prompt_logprobs
from sglang_triattn.patches.request.integrity import all_or_nothing, unbroken
from sglang_triattn.patches.request.linear_states import free_state
from sglang_triattn.patches.request.window_pool import row_allocator
from sglang_triattn.request.options import KEY
from sglang_triattn.request.row_record import RowRecord
from sglang_triattn.rounds.plan import ceil_align, frozen_length, max_kv_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId

    from sglang_triattn.patches.sglang_types import Scheduler


@dataclass(eq=False)
class Conversation:
    """One idle row.

    Attributes:
        kv: SGLang's record of the row; `kv_allocated_len` is its physical length.
        lock: the tree lock on its frozen prefix, which ends at `last_node`.
        ids: token ids of its logical positions.
        owner: `reuse_key` of the request that left it.
        record: what rounds did to it.
        used: when its last turn arrived, in seconds.
    """

    kv: ReqKvInfo
    lock: TreeLock | None
    last_node: NodeId
    ids: array
    owner: tuple
    record: RowRecord
    used: float

    def free_slots(self, scheduler: Scheduler) -> None:
        """Frees its private slots; if this raises anything but IntegrityError, nothing has changed."""
        with all_or_nothing(lambda: free_slots(scheduler)):
            scheduler.tree_cache.free_kv_row(self.kv, [(self.kv.cache_protected_len, self.kv.kv_allocated_len)])

    def free_row(self, scheduler: Scheduler) -> None:
        """Gives the rest back, after `free_slots`.

        Raises:
            IntegrityError: it failed.
        """
        with unbroken("a conversation's row was freed"):
            scheduler.tree_cache.unlock(self.lock)
            free_state(scheduler, self.kv)
            # It frees the row of the record `kv`, and looks at nothing else of its argument.
            scheduler.req_to_token_pool.free(cast("Req", self))
        self.kv.mark_kv_released()


def free_slots(scheduler: Scheduler) -> int:
    """Free slots of all KV pools."""
    allocator = scheduler.token_to_kv_pool_allocator
    windows = getattr(allocator, "swa_available_size", lambda: 0)
    return row_allocator(allocator).available_size() + windows()


def continues(idle: Conversation, request: Req) -> bool:
    """Whether a request's prompt goes on after the text of an idle row, and may reuse it."""
    ids = request.origin_input_ids + request.output_ids
    return (
        not wants_prompt_logprobs(request)
        and tokens_tell_all(request)
        and len(ids) > len(idle.ids)
        and ids[: len(idle.ids)] == idle.ids
        and idle.owner == reuse_key(request)
        and settings_of(request) is not None
    )


def record_for_turn(idle: Conversation, request: Req, page_size: int) -> RowRecord:
    """The record of a row that a request resumes: what the request adds to it is input, which may have to stay."""
    settings, length = settings_in_use(request), idle.kv.kv_allocated_len
    if not settings.keeps_inputs:
        return idle.record
    new = len(request.origin_input_ids) + len(request.output_ids) - len(idle.ids)
    return replace(idle.record, inputs=idle.record.inputs.appended(length, length + new, page_size))


def unfit(idle: Conversation, record: RowRecord, request: Req, scheduler: Scheduler) -> str | None:
    """Why the empty pool could not hold a request that resumes this row, in one sentence; None if it could.

    Input tokens that stay come on top of the budget. Nothing else than a refusal would hold a turn to the pool: its
    inputs may not be compacted.

    Args:
        record: from `record_for_turn`.
    """
    settings, page_size = settings_in_use(request), scheduler.tree_cache.page_size
    if not settings.keeps_inputs:
        return None
    frozen = frozen_length(settings, idle.kv.cache_protected_len, record.prompt_len, page_size)
    end = logical_end(request) - record.evicted_tokens
    most = max_kv_tokens(settings, frozen=frozen, logical_end=end, page_size=page_size, inputs=record.inputs)
    capacity = scheduler.max_total_num_tokens - compression_of(request).reserve
    if ceil_align(most, page_size) + page_size <= capacity:
        return None
    return (
        f"With this turn the conversation may hold {most} tokens, because the inputs of its resumed turns stay whole, "
        f"but the KV pool has room for {capacity - page_size}: send less, raise the pool, or set "
        f"custom_params.{KEY}.turn_inputs to compact."
    )


def reuse_key(request: Req) -> tuple:
    """What else must match for K/V to be reused: adapter, extra key, salt."""
    return request.lora_id, request.extra_key, request.cache_salt
