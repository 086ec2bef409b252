"""Early compaction rounds, so that a full pool does not lead to a retraction.

SGLang parts: `ScheduleBatch.check_decode_mem` and `retract_decode` (sglang/srt/managers/schedule_batch.py), which a
step reaches after the safe point. Allocator sizes and token counts are equal on all tensor-parallel ranks, so every
rank decides the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from sglang_triattn.patches.request.compressed import compression_of
from sglang_triattn.patches.request.fields import rows_of
from sglang_triattn.patches.request.row import CompressedRow, compactable_row
from sglang_triattn.patches.request.window_pool import WindowPool, row_allocator
from sglang_triattn.rounds.plan import Plan, ceil_align, plan_eviction

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler


def early_rounds(
    scheduler: Scheduler,
    requests: Sequence[Req],
    joining: ScheduleBatch | None,
    due: Sequence[tuple[CompressedRow, Plan]],
    drop_one: Callable[[], bool],
    windows: WindowPool | None,
) -> list[tuple[CompressedRow, Plan]]:
    """(row, plan) of rounds that free the slots that the next decode step lacks, largest first.

    Args:
        requests: the running requests.
        joining: as for `Compressor.run_due_rounds`.
        due: the rounds that run anyway.
        drop_one: frees memory that is not in use; False if there is none.
        windows: the window layers' own KV pool, if they have one.
    """
    page_size = scheduler.token_to_kv_pool_allocator.page_size
    if requests:
        most = most_of_next_step(scheduler, requests[0], page_size)
        if most <= free_slots(scheduler) and (windows is None or most <= windows.free_slots()):
            return []
    needed = slots_of_next_step(requests, joining, page_size)
    if windows is not None:
        windows.make_room(requests, needed, drop_one)
    needed -= sum(plan.freed_slots for _, plan in due)
    while needed > free_slots(scheduler) and drop_one():
        pass
    missing = needed - free_slots(scheduler)
    if missing <= 0:
        return []
    taken = {id(row.request) for row, _ in due}
    chosen = []
    candidates = (request for request in requests if id(request) not in taken)
    for row, plan in sorted(worthwhile(candidates, page_size), key=lambda found: -found[1].freed_slots):
        if missing <= 0:
            break
        chosen.append((row, plan))
        missing -= plan.freed_slots
    return chosen


def most_of_next_step(scheduler: Scheduler, request: Req, page_size: int) -> int:
    """No fewer slots than the next step allocates, without a look at each request: usually there are many more.

    Args:
        request: any of the running requests.
    """
    rows = scheduler.req_to_token_pool
    # A decode server has more of them, for requests whose K/V another server is sending.
    taken = rows.size + rows.pre_alloc_size - rows.available_size()
    return taken * (ceil_align(compression_of(request).reserve, page_size) + page_size)


def slots_of_next_step(requests: Sequence[Req], joining: ScheduleBatch | None, page_size: int) -> int:
    """KV slots, in whole pages, that the next decode step allocates; one per beam, at page size 1.

    With speculative decoding, what their reserves lack, see `draft_reserve`.
    """
    others = joining.reqs if joining is not None and joining.forward_mode.is_extend() else []
    distinct = {id(request): request for request in (*requests, *others)}.values()
    holders = [request for request in distinct if request.kv.holds_kv and not request.finished()]
    reserve = compression_of(holders[0]).reserve if holders else 0
    if reserve:
        ends = [(request.kv.kv_committed_len + reserve, request.kv.kv_allocated_len) for request in holders]
        return sum(max(ceil_align(end, page_size) - ceil_align(held, page_size), 0) for end, held in ends)
    return page_size * sum(rows_of(request) for request in holders if request.kv.kv_allocated_len % page_size == 0)


def free_slots(scheduler: Scheduler) -> int:
    """KV slots that are free, or that the tree gives up on demand."""
    return row_allocator(scheduler.token_to_kv_pool_allocator).available_size() + scheduler.tree_cache.evictable_size()


def worthwhile(candidates: Iterable[Req], page_size: int) -> Iterator[tuple[CompressedRow, Plan]]:
    """Rounds that free enough to be worth scoring: at least a quarter of what a regular round frees."""
    for request in candidates:
        row = compactable_row(request, page_size)
        if row is None:
            continue
        plan = plan_eviction(row.settings.under_pressure(), **row.lengths())
        if plan is None or plan.freed_slots < max(row.settings.interval // 4, 1):
            continue
        # Unlike a regular round, this one can wait until the newest tokens are known.
        if row.recent(plan) >= row.settings.recent:
            yield row, plan
