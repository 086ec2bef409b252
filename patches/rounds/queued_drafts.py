"""Lengths of rows while a step that verifies drafted tokens is queued, under overlap scheduling.

SGLang part: `FutureMap.resolve_seq_lens_cpu` (sglang/srt/managers/overlap_utils.py).

Until such a step has run, the number of tokens it accepts is unknown. It publishes the new length of each row on the
device, and the next step reads it as its last preparation. The host's lengths are one step late.

A round between the two evicts tokens that both steps take for computed, and moves up the reserve with the tokens of the
queued step in it. What that step publishes still counts the evicted tokens, so the next step takes them off, once.

The slots of the reserve stay where they are, so at page sizes above 1 a round evicts whole pages (`rules.complete`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakSet

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.batch_lengths import lengths_without
from sglang_triattn.patches.request.draft_reserve import tokens_per_step

if TYPE_CHECKING:
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler

# Attribute of a Req: how often it had been retracted, and tokens evicted since a step last read its row's length.
_UNREAD = "triattention_unread"
# The requests that have any, so that most steps look at none.
_unread: WeakSet[Req] = WeakSet()


def hooks() -> list[Hook]:
    target = "sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu"
    return [
        Hook(
            target,
            "after",
            _take_off,
            "self batch stream_ordered",
            why="takes evicted tokens off the lengths that a queued step published",
        )
    ]


def queues_drafts(scheduler: Scheduler) -> bool:
    """Whether steps with drafted tokens are queued before the one in front of them has ended."""
    return scheduler.enable_overlap and not scheduler.spec_algorithm.is_none()


def unknown_per_row(scheduler: Scheduler) -> int:
    """Most entries of a row of which the host does not know whether they will hold, while a step is queued."""
    return tokens_per_step(scheduler) if queues_drafts(scheduler) else 0


def unread_of(request: Req) -> int:
    """Tokens evicted from the request's row since a step last read its length."""
    retractions, evicted = getattr(request, _UNREAD, (0, 0))
    # A retracted request starts over with a row of its own length.
    return evicted if retractions == request.retraction_count else 0


def write_unread(request: Req, evicted: int) -> None:
    setattr(request, _UNREAD, (request.retraction_count, evicted))
    if evicted:
        _unread.add(request)
    else:
        _unread.discard(request)


def _take_off(_: None, future_map: FutureMap, batch: ScheduleBatch, *__: object, **___: object) -> None:
    """Shortens the lengths that a step has just read by what rounds have evicted in the meantime."""
    drafts = batch.spec_info
    if not _unread or drafts is None or getattr(drafts, "future_indices", None) is None:
        return
    evicted = [unread_of(request) for request in batch.reqs]
    if not any(evicted):
        for request in [request for request in _unread if not unread_of(request)]:
            _unread.discard(request)
        return
    for request in batch.reqs:
        write_unread(request, 0)
    lengths_without(batch, evicted).write(batch)
