"""Copies of idle rows, so that a turn that fails costs its conversation nothing.

SGLang parts: allocators of slots (sglang/srt/mem_cache/allocator), `ReqToTokenPool`, `HybridReqToTokenPool`.

A request that resumes a row goes on in the row's own slots. A copy of the private part stays idle, in slots that would
otherwise be free or hold what the tree used least recently:

    0          protected        length
    |-- tree ----|-- own slots ---|       the row, which its request extends and compacts
          |
          +------|-- new slots ---|       the copy: it keeps the row's lock

Where window layers have a pool of their own, the copy also has peers for what the row has peers for, and where layers
keep a state, a state of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, cast

import torch

from sglang_triattn.kernels.mover import Mover
from sglang_triattn.patches.model.buffers import kv_buffers
from sglang_triattn.patches.model.draft import make_follower, window_buffers
from sglang_triattn.patches.model.layers import attention_layers
from sglang_triattn.patches.ranks.pipeline import after_queued_step
from sglang_triattn.patches.request.integrity import give_back
from sglang_triattn.patches.request.linear_states import can_copy_state, copy_state
from sglang_triattn.patches.request.window_pool import cursor_of, has_window_pool, row_allocator
from sglang_triattn.rounds.plan import ceil_align

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    from sglang_triattn.patches.sglang_types import Scheduler

GIVEN_UP = "a copy of a row was given up"


class RowCopier:
    """Copies the idle rows of a scheduler.

    Args:
        scheduler: SGLang's Scheduler, fully built.
        movers: of each KV pool whose slots rows list, all of its layers.
        window_movers: of each pool of window layers, whose slots are peers; none without one.
    """

    def __init__(self, scheduler: Scheduler, movers: Sequence[Mover], window_movers: Sequence[Mover] = ()) -> None:
        self._scheduler = scheduler
        self._movers, self._window_movers = movers, window_movers
        self._rows = scheduler.req_to_token_pool
        self._slots = row_allocator(scheduler.token_to_kv_pool_allocator)
        self._windows = cast("SWATokenToKVPoolAllocator", scheduler.token_to_kv_pool_allocator)

    def copy(self, kv: ReqKvInfo, room: int) -> tuple[ReqKvInfo, Callable[[], None]] | None:
        """A copy of the row that `kv` records; None if there is too little memory. If it raises, nothing has changed.

        The second item copies the K/V, which can wait until the row's first round or its release: until then its
        request only appends to the row. Where window layers have a pool of their own, this method copies it, because
        SGLang frees what a window has left before the next prefill.

        Args:
            room: slots that are free, or that the tree gives up, and that no request may still need.

        Raises:
            IntegrityError: it failed halfway.
        """
        page_size, protected, length = self._slots.page_size, kv.cache_protected_len, kv.kv_allocated_len
        whole = ceil_align(length, page_size) - protected
        peers = ceil_align(length, page_size) - max(cursor_of(kv, page_size), protected) if self._window_movers else 0
        if whole + page_size > room or not self._rows.available_size() or not can_copy_state(self._scheduler, kv):
            return None
        if not self._make_room(whole, peers):
            return None
        with ExitStack() as undo:
            copied, finish = self._copy(kv, whole, peers, undo)
            if self._window_movers:
                finish()
                finish = _nothing
            undo.pop_all()
        return copied, finish

    def _make_room(self, slots: int, peers: int) -> bool:
        """Has the tree give up what is missing in the pools; False if that is not enough."""
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams

        missing = [max(wanted - free, 0) for wanted, free in zip((slots, peers), self._free(), strict=True)]
        if any(missing):
            self._scheduler.tree_cache.evict_for_alloc(EvictParams(num_tokens=missing[0], swa_num_tokens=missing[1]))
        return all(wanted <= free for wanted, free in zip((slots, peers), self._free(), strict=True))

    def _free(self) -> tuple[int, int]:
        """Free slots, and free peers."""
        peers = self._windows.swa_attn_allocator.available_size() if self._window_movers else 0
        return self._slots.available_size(), peers

    def _copy(self, kv: ReqKvInfo, whole: int, peers: int, undo: ExitStack) -> tuple[ReqKvInfo, Callable[[], None]]:
        """The copy, in `whole` new slots with `peers` new peers, and what copies K/V; `undo` gives the slots back."""
        table, protected, length = self._rows.req_to_token, kv.cache_protected_len, kv.kv_allocated_len
        copied = copy.copy(kv)
        copied.component_evicted_seqlens = dict(kv.component_evicted_seqlens)
        copied.req_pool_idx = _allocated(self._rows.alloc_rows(1))[0]
        undo.callback(give_back, GIVEN_UP, self._rows.free_rows, [copied.req_pool_idx])
        new = _allocated(self._slots.alloc(whole))
        undo.callback(give_back, GIVEN_UP, self._slots.free, new)
        sources, targets = table[kv.req_pool_idx, protected:length].clone(), new[: length - protected].to(table.dtype)
        table[copied.req_pool_idx, :protected] = table[kv.req_pool_idx, :protected]
        table[copied.req_pool_idx, protected:length] = targets
        moves = [(mover, sources, targets) for mover in self._movers]
        if peers:
            first = whole - peers
            found = self._copy_peers(new[first:], undo)[: len(sources) - first].to(table.dtype)
            read = self._windows.translate_loc_from_full_to_swa(sources[first:]).to(table.dtype)
            moves += [(mover, read, found) for mover in self._window_movers]
        state = copy_state(self._scheduler, kv, copied, undo)
        # The next step changes a state in place.
        with after_queued_step(self._scheduler):
            state()

        def finish() -> None:
            with after_queued_step(self._scheduler, *(slots for _, *both in moves for slots in both)):
                for mover, read, written in moves:
                    mover.copy(read, written)

        return copied, finish

    def _copy_peers(self, slots: torch.Tensor, undo: ExitStack) -> torch.Tensor:
        """Gives new slots new peers, which it returns."""
        allocator = self._windows.swa_attn_allocator
        found = _allocated(allocator.alloc(len(slots)))
        undo.callback(give_back, GIVEN_UP, allocator.free, found)
        self._windows.set_full_to_swa_mapping(slots, found)
        undo.callback(give_back, GIVEN_UP, self._windows.clear_full_to_swa_mapping, slots)
        return found

    def rehearse(self) -> None:
        """Compiles what copies, on the current stream: the padding slot, which no request owns, onto itself."""
        padding = torch.zeros(1, dtype=torch.int32, device=self._rows.req_to_token.device)
        for mover in (*self._movers, *self._window_movers):
            mover.copy(padding, padding)


def make_copier(scheduler: Scheduler, *, kernels: bool) -> RowCopier:
    """The RowCopier of a fully built scheduler.

    Raises:
        ValueError: the kernels cannot move what the KV pool holds.
    """
    runner = scheduler.tp_worker.model_runner
    pool, layers = runner.token_to_kv_pool, attention_layers(runner.model)
    own_pool = has_window_pool(scheduler)
    full = [layer.number for layer in layers if not (own_pool and layer.window)]
    movers = [Mover(*kv_buffers(pool, full), kernels=kernels)]
    follower = make_follower(scheduler, kernels=kernels)
    if follower is not None:
        movers.append(follower.mover)
    windows = [layer.number for layer in layers if layer.window] if own_pool else []
    pools = (kv_buffers(pool, windows), window_buffers(scheduler))
    return RowCopier(scheduler, movers, [Mover(*each, kernels=kernels) for each in pools if each[0]])


def _nothing() -> None:
    pass


def _allocated(found):
    """What an allocator has returned.

    Raises:
        RuntimeError: it had too little, against its own count.
    """
    if found is None:
        raise RuntimeError("an allocator had less than it counted")
    return found
