"""Window layers with a KV pool of their own: which tokens of a row still have a slot in it.

SGLang parts: `SWATokenToKVPoolAllocator` (sglang/srt/mem_cache/allocator/swa.py), the cursor that SGLang keeps in
`ReqKvInfo`, `ScheduleBatch.maybe_evict_swa` (sglang/srt/managers/schedule_batch.py).

A row lists slots of the pool of the full layers. Each of them may have a peer, a slot in the window layers' pool; the
allocator hands out both together, and maps one to the other. Once a token has left the window, SGLang frees its peer
and keeps its slot. A cursor says how far it has come:

    0          protected                cursor              length
    |-- frozen ---|-- slots without peers --|-- slots with peers --|
     peers as the   full layers only         full layers, and what the next
     tree keeps them                         queries of window layers see

A round empties slots, moves K/V between slots, or permutes a row, all of it before the newest tokens; and it keeps at
least as many of those as a window is wide. So it first frees the peers of everything before them. Then emptied slots
have none, and what moves from slot to slot is of the full layers alone. Afterwards the cursor moves up the row with the
tokens after it.

Slots of a reserve (`draft_reserve`) have peers too, but a window ends at the computed entries. At their end, as the
host counts them, the queued step's first drafted token stands, and it sees the window before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.model.layers import UnsupportedModel
from sglang_triattn.patches.request.compressed import evicted_of
from sglang_triattn.patches.request.draft_reserve import reserve_per_row
from sglang_triattn.patches.request.integrity import all_or_nothing
from sglang_triattn.rounds.plan import ceil_align

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache

    from sglang_triattn.patches.sglang_types import KVAllocator, RowAllocator, Scheduler


def row_allocator(allocator: KVAllocator) -> RowAllocator:
    """The allocator of the slots that rows list: those of the full layers, where window layers have other ones."""
    return cast("RowAllocator", getattr(allocator, "full_attn_allocator", allocator))


def has_window_pool(scheduler: Scheduler) -> bool:
    """Whether window layers have a KV pool of their own."""
    return hasattr(scheduler.token_to_kv_pool_allocator, "swa_attn_allocator")


def cursor_of(kv: ReqKvInfo, page_size: int) -> int:
    """The first entry after the frozen ones that has a peer, whole pages."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    return max(kv.get_evicted_seqlen(ComponentType.SWA), kv.swa_dead_lo(page_size))


def set_cursor(kv: ReqKvInfo, cursor: int) -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    kv.set_evicted_seqlen(ComponentType.SWA, cursor)


def check_reach(scheduler: Scheduler, window: int) -> None:
    """Raises TriAttentionError unless `window` tokens, the newest that rounds keep, are enough, and fit the pool."""
    if not has_window_pool(scheduler):
        return
    pool = WindowPool(scheduler)
    if pool.reach >= window:
        raise UnsupportedModel(f"its window layers keep {pool.reach + 1} tokens, its config.json speaks of {window}")
    if pool.size < pool.peak + 2 * pool.page_size:
        raise TriAttentionError(
            f"The KV pool of the window layers has {pool.size} slots, but a request may need {pool.peak} of them "
            "in addition to its next chunk: raise --swa-full-tokens-ratio or --max-total-tokens."
        )


class WindowPool:
    """The window layers' pool of a scheduler.

    Args:
        scheduler: one for which `has_window_pool` holds.

    Attributes:
        page_size: slots per page, as in the other pool.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._allocator = cast("SWATokenToKVPoolAllocator", scheduler.token_to_kv_pool_allocator)
        self._rows = scheduler.req_to_token_pool.req_to_token
        self.page_size = self._allocator.page_size
        self._reserve = reserve_per_row(scheduler)

    @property
    def reach(self) -> int:
        """Tokens before its own that a query of a window layer sees."""
        return cast(int, self._scheduler.tree_cache.swa_retain_window)

    @property
    def size(self) -> int:
        """Slots."""
        return self._allocator.size_swa

    @property
    def peak(self) -> int:
        """Most slots, in whole pages, that a decoding request holds when memory is short, see `make_room`."""
        window = ceil_align(max(self.reach, self.page_size), self.page_size)
        return window + ceil_align(self._reserve, self.page_size) + 2 * self.page_size

    def growth_in(self, requests: Sequence[Req]) -> int:
        """Slots, in whole pages, that decoding requests may still take, all of them together.

        In one loop without calls, because SGLang asks in every step in which a request waits, of every running one.
        """
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        total, page_size, peak, window = 0, self.page_size, self.peak, ComponentType.SWA
        step = self._reserve or 1
        for request in requests:
            kv = request.kv
            if kv.req_pool_idx is None:
                continue
            # What it holds, as `kv_private_swa_tokens` of SGLang counts it.
            protected, held, first = kv.cache_protected_len, kv.kv_allocated_len, kv.swa_evict_floor
            if page_size > 1:
                held, first = ceil_align(held, page_size), ceil_align(first, page_size)
            if first < protected or kv.swa_evict_floor <= protected:
                first = protected
            freed = kv.component_evicted_seqlens.get(window, 0) - first
            growth = peak - held + protected + (freed if freed > 0 else 0)
            # SGLang sets a limit for requests that come without one.
            left = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0) + step  # pyright: ignore[reportOptionalOperand]
            if growth > left:
                growth = min(growth, left if page_size == 1 else ceil_align(left, page_size))
            if growth > 0:
                total += growth
        return total

    def most_of(self, request: Req, held: int) -> int:
        """Most slots, in whole pages, that a request holds which gets `held` of them with its row."""
        # SGLang sets a limit for requests that come without one.
        left = max(request.sampling_params.max_new_tokens - len(request.output_ids), 0)  # pyright: ignore[reportOptionalOperand]
        step = self._reserve or 1
        end, next_end = (ceil_align(held + tokens, self.page_size) for tokens in (left + step, step))
        # The window slides after a step at the earliest.
        return max(min(self.peak, end), next_end)

    def free_before(self, rows: Sequence[tuple[ReqKvInfo, int]]) -> list[int]:
        """Frees the peers of all entries before the newest tokens of each row, in whole pages.

        The page in which the newest tokens begin keeps its peers. Tokens before them are outside every window and are
        never read.

        Args:
            rows: SGLang's record of each row, and the place of the first of its newest tokens.

        Returns:
            Each row's cursor.
        """
        freed, cursors = [], []
        for kv, newest in rows:
            first, end = cursor_of(kv, self.page_size), newest - newest % self.page_size
            if first < end:
                freed.append(self._rows[kv.req_pool_idx, first:end])
            cursors.append(max(first, end))
        if freed:
            # Each part is whole pages.
            with all_or_nothing(self._allocator.swa_available_size):
                self._allocator.free_swa_segment(torch.cat(freed), start_pos=0)
        for (kv, _), cursor in zip(rows, cursors, strict=True):
            set_cursor(kv, cursor)
        return cursors

    def rehearse(self) -> None:
        """Compiles the kernel by which SGLang frees peers on a GPU; it writes to a mapping of its own."""
        from sglang.kernels.ops.memory.allocator import get_and_clear_swa_pages

        allocator, page_size = self._allocator, self.page_size
        page = torch.zeros(page_size, dtype=self._rows.dtype, device=self._rows.device)
        mapping = torch.zeros(page_size, dtype=allocator.full_to_swa_index_mapping.dtype, device=page.device)
        checked = page_size > 1 and cast("PagedTokenToKVPoolAllocator", allocator.swa_attn_allocator).debug_mode
        get_and_clear_swa_pages(page[::page_size], mapping, page_size, check_page_mappings=checked)

    def make_room(self, requests: Sequence[Req], needed: int, drop_one: Callable[[], bool]) -> None:
        """Sees to it that the next step finds `needed` slots, as far as that costs no running request its row.

        Args:
            drop_one: frees memory that is not in use; False if there is none.
        """
        if needed <= self.free_slots():
            return
        for request in requests:
            with all_or_nothing(self._allocator.swa_available_size):
                slide_window(request, self._scheduler.tree_cache)
        while needed > self.free_slots() and drop_one():
            pass

    def covers_window(self, kv: ReqKvInfo, length: int) -> bool:
        """Whether all private tokens that a query after the first `length` entries sees have peers."""
        return cursor_of(kv, self.page_size) <= max(length - self.reach, kv.cache_protected_len)

    def free_slots(self) -> int:
        """Slots that are free, or that the tree gives up on demand."""
        return self._allocator.swa_available_size() + self._scheduler.tree_cache.swa_evictable_size()


def slide_window(request: Req, tree_cache: BasePrefixCache) -> None:
    """Frees the peers of tokens that have left a request's window.

    SGLang does so now and then in decode and, where the tree takes the chunks, in a prefill.
    """
    if tree_cache.supports_swa():
        # With overlap, the queued step's first query is that of the last entry, or of the one after it if it drafts.
        tree_cache.evict_sliding_windows(request, request.kv.kv_committed_len - 1)


def hooks() -> list[Hook]:
    target = "sglang.srt.managers.schedule_batch.ScheduleBatch"
    return [
        Hook(
            f"{target}._swa_eviction_trigger",
            "after",
            _due_by_row,
            "self sliding_window_size eviction_interval",
            why="compares a window with the shortened row",
        ),
        Hook(
            f"{target}._evict_swa",
            "around",
            _slide_by_row,
            "self req pre_len eviction_interval",
            why="frees what has left a window by its place in the row",
        ),
    ]


def _due_by_row(
    due: Callable[[Req], bool], _: ScheduleBatch, sliding_window_size: int, eviction_interval: int
) -> Callable[[Req], bool]:
    """Compares the cursor of a shortened row with the row's length; SGLang compares it with all tokens."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    def due_by_row(request: Req) -> bool:
        evicted = evicted_of(request)
        if not evicted:
            return due(request)
        left_window = request.seqlen - evicted - 1 - sliding_window_size
        return left_window >= request.kv.get_evicted_seqlen(ComponentType.SWA) + eviction_interval

    return due_by_row


def _slide_by_row(original: Callable, batch: ScheduleBatch, req: Req, pre_len: int, **interval: int) -> None:
    """Takes the end of the window for a place in the row; in decode SGLang counts all tokens."""
    original(batch, req, pre_len - (evicted_of(req) if batch.forward_mode.is_decode() else 0), **interval)
