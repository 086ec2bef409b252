"""What running requests hold, for `/metrics` and `/server_info`: from counts that the host has, only when asked for.

SGLang parts: the scheduler's running batch, KV pool and tree.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from sglang_triattn.patches.ranks.pipeline import running_batches
from sglang_triattn.patches.request.compressed import compression_of, evicted_of, frozen_of, protected_of, settings_of
from sglang_triattn.patches.request.window_pool import row_allocator

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_triattn.patches.sglang_types import Scheduler

LISTED = 256
"""Most requests that `/server_info` lists."""
LONGEST_ID = 64
"""Characters of a request's id that it shows."""


def held_tokens(requests: Iterable[Req]) -> tuple[int, int]:
    """(physical, logical) lengths of `requests`, summed. A prefix that several share counts for each of them."""
    physical = evicted = 0
    for request in requests:
        physical += request.kv.kv_committed_len
        evicted += evicted_of(request)
    return physical, physical + evicted


def running(scheduler: Scheduler) -> list[Req]:
    """Requests that decode and hold a row."""
    requests = (request for batch in running_batches(scheduler) for request in batch.reqs)
    return [request for request in requests if request.kv.holds_kv and not request.finished()]


def describe(scheduler: Scheduler) -> dict[str, Any]:
    """The running requests and the pool, as `/server_info` shows them; lengths in tokens, the longest first."""
    requests, tree = running(scheduler), scheduler.tree_cache
    allocator = row_allocator(scheduler.token_to_kv_pool_allocator)
    physical, logical = held_tokens(requests)
    longest = heapq.nlargest(LISTED, requests, key=lambda request: request.kv.kv_committed_len + evicted_of(request))
    return {
        "physical_tokens": physical,
        "logical_tokens": logical,
        "pool_slots": scheduler.max_total_num_tokens,
        "pool_free_slots": allocator.available_size(),
        "pool_evictable_slots": tree.evictable_size(),
        "running_requests": len(requests),
        "waiting_requests": len(scheduler.waiting_queue),
        "requests": [_describe_one(request, allocator.page_size) for request in longest],
    }


def _describe_one(request: Req, page_size: int) -> dict[str, Any]:
    physical, settings = request.kv.kv_committed_len, settings_of(request)
    frozen = None if settings is None else min(frozen_of(request, settings, page_size), physical)
    inputs = 0 if frozen is None else protected_of(compression_of(request), frozen, physical, page_size)
    return {
        "id": str(request.rid)[:LONGEST_ID],
        "logical": physical + evicted_of(request),
        "physical": physical,
        "frozen": frozen,
        "protected": inputs,
        "rounds": compression_of(request).rounds,
        "generated": len(request.output_ids),
    }
