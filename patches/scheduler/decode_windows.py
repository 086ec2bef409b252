"""What window layers with a KV pool of their own need on a decode server.

SGLang part: `DecodePreallocQueue` (sglang/srt/disaggregation/decode.py).

A request arrives with the K/V of its last window, at page size 1 with slots for its whole prompt, and needs no more
than a window's, however long it gets. SGLang admits it once that pool could hold its whole answer, or 4,096 tokens of
it, so that one longer than the pool would wait for ever; at page size 1 it takes the two pools for one. Here each
request, compressed or not, reserves what it lacks to the most that it ever holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.window_pool import WindowPool, has_window_pool
from sglang_triattn.rounds.plan import ceil_align

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue
    from sglang.srt.managers.schedule_batch import Req

    from sglang_triattn.patches.sglang_types import Scheduler

_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


class WindowReservation:
    """Admission to the window layers' pool.

    Args:
        active: the requests that hold a row.

    Attributes:
        asked: the request of which SGLang has asked last how much it needs.
    """

    def __init__(self, active: Callable[[DecodePreallocQueue], list[Req]]) -> None:
        self.asked: Req | None = None
        self._active = active

    def hooks(self) -> list[Hook]:
        return [
            Hook(
                f"{_QUEUE}._uses_swa_reservation",
                "after",
                _has_pool,
                "self",
                why="counts the slots of window layers by themselves at each page size",
            ),
            Hook(
                f"{_QUEUE}._swa_tail_allocatable_token_budget",
                "around",
                self._room,
                "self retractable_tokens retractable_swa_tokens count_retracted n_active reserved_tokens "
                "extra_reserved_reqs",
                why="keeps the slots of window layers that requests lack to a window",
            ),
            Hook(
                f"{_QUEUE}._prealloc_reservation_fits",
                "around",
                self._fits,
                "self full_tokens swa_tokens full_allocatable_tokens swa_allocatable_tokens",
                why="asks window layers for no more slots than a window needs",
            ),
        ]

    def _room(self, _: Callable, queue: DecodePreallocQueue, *, count_retracted: bool = True, **__: int | None) -> int:
        """Slots that no request may still need."""
        windows = WindowPool(_scheduler_of(queue))
        waiting = queue.retracted_queue if count_retracted else ()
        needed = sum(_needed(queue, windows, request) for request in waiting)
        return windows.free_slots() - windows.growth_in(self._active(queue)) - needed

    def _fits(
        self, original: Callable, queue: DecodePreallocQueue, full_tokens: int, swa_tokens: int, **room: int | None
    ) -> bool:
        if self.asked is not None and has_window_pool(_scheduler_of(queue)):
            swa_tokens = _needed(queue, WindowPool(_scheduler_of(queue)), self.asked)
        return original(queue, full_tokens, swa_tokens, **room)


def _scheduler_of(queue: DecodePreallocQueue) -> Scheduler:
    return cast("Scheduler", queue.scheduler)


def _has_pool(counts: bool, queue: DecodePreallocQueue) -> bool:
    return counts or has_window_pool(_scheduler_of(queue))


def _needed(queue: DecodePreallocQueue, windows: WindowPool, request: Req) -> int:
    """Most slots, in whole pages, that a request without a row will hold."""
    _, held = queue._prealloc_kv_lens(request)
    return windows.most_of(request, ceil_align(held, windows.page_size))
