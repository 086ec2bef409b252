"""The census of the whole server, see `sglang_triattn.census`. SGLang parts: scheduler, tree, allocator, row table.

With SGLANG_TRIATTN_CHECK=1 it is taken when the server is idle, and before and after the compaction rounds of every
step that has any. It is meant for tests: it waits for the device, and takes longer the larger the pool.

A fault ends the scheduler, and with it the server: a slot with two owners has given one request another's K/V, or is
about to, and it is unknown whose answers are still right.

With overlap scheduling, one step is queued at the safe point and its result is not known yet. It was planned with the
requests that held a row then, so the slots that it writes are theirs. There are exceptions, which the order on the
forward stream makes safe: a request that has ended since then gave its row back; a round of the current step may have
freed what the queued step reads and writes; and so may the tree, when it took a chunk of a prefill that it already had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sglang_triattn.census import Holders, IntegrityError, Pool, Write, find_fault
from sglang_triattn.census_windows import find_peer_fault
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.observability.census_lengths import Lengths, read_lengths
from sglang_triattn.patches.observability.census_peers import read_peers, to_host
from sglang_triattn.patches.ranks.pipeline import batches_in_flight, requests_of_other_batches
from sglang_triattn.patches.request.compressed import evicted_of
from sglang_triattn.patches.request.fields import beams_of, decoded_in
from sglang_triattn.patches.request.window_pool import has_window_pool, row_allocator
from sglang_triattn.patches.rounds.queued_drafts import unknown_per_row
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.disaggregation import requests_in_transfer

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId

    from sglang_triattn.patches.scheduler.idle_rows import Conversation, Name
    from sglang_triattn.patches.sglang_types import BeamGroup, Scheduler


class Census:
    """The checks of one scheduler.

    Args:
        conversations: its idle rows.
    """

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._scheduler: Scheduler
        self._attached = False

    def hooks(self) -> list[Hook]:
        return [
            Hook(
                "sglang.srt.managers.scheduler.Scheduler.on_idle",
                "before",
                self.on_idle,
                "self",
                why="takes the census of an idle server",
            )
        ]

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler, self._attached = scheduler, True
        self._has_reserves = not scheduler.spec_algorithm.is_none()
        self._unknown = unknown_per_row(scheduler)
        self._no_slots = torch.empty(0, dtype=torch.int64, device=scheduler.req_to_token_pool.req_to_token.device)

    def on_idle(self, scheduler: Scheduler) -> None:
        if self._attached:
            self._check("idle after", scheduler.running_batch, scheduler.last_batch)

    def around_rounds(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> AbstractContextManager:
        """A context for the rounds of a step: make it before they are planned, and enter it only if there are any.

        Raises:
            IntegrityError: on entry or exit, if the books are wrong.
        """
        return self._around_rounds(running_batch, last_batch, self._marks(running_batch, last_batch))

    @contextmanager
    def _around_rounds(
        self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None, at_start: dict[int, tuple]
    ) -> Iterator[None]:
        # Planning may have changed a row already: the tree takes a chunk of a prefill before its round.
        self._check("before the rounds of", running_batch, last_batch, at_start)
        yield
        self._check("after the rounds of", running_batch, last_batch, at_start)

    def _check(
        self,
        when: str,
        running_batch: ScheduleBatch,
        last_batch: ScheduleBatch | None,
        at_start: dict[int, tuple] | None = None,
    ) -> None:
        """Raises IntegrityError for the first fault.

        Args:
            when: start of the sentence, before the step's number.
            at_start: what `_marks` returned when no row had changed since the queued step was planned; None while none
                has.
        """
        now = {} if at_start is None else self._marks(running_batch, last_batch)
        moved = {key for key, mark in (at_start or {}).items() if now.get(key) != mark}
        fault = self._fault(running_batch, last_batch, moved)
        if fault is not None:
            raise IntegrityError(f"Integrity: {when} step {self._scheduler.forward_ct}, {fault}.")

    def _fault(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None, moved: set[int]) -> str | None:
        requests, idle = self._requests(running_batch, last_batch), self._conversations.idle()
        overlapped = [batch for batch, _ in getattr(self._scheduler, "result_queue", ())]
        queued = [*overlapped, *batches_in_flight(self._scheduler)]
        chunked = self._scheduler.chunked_req
        # A queued step of drafts changes no book before it has ended.
        decoding = {id(request) for batch in queued for request in decoded_in(batch) if not self._unknown}
        filling = {id(request) for batch in queued for request in batch.reqs if batch.forward_mode.is_extend()}
        filling |= {id(request) for request in requests_in_transfer(self._scheduler)}
        filling -= {id(request) for batch in queued if batch.forward_mode.is_mixed() for request in decoded_in(batch)}
        books = {"reserve": self._has_reserves, "unknown": self._unknown}
        lengths = read_lengths(requests, idle, filling | {id(chunked)}, decoding, **books)
        fault = lengths.fault() or lengths.fault_of_batch(running_batch, chunked)
        if fault is None and last_batch is not None and last_batch is not running_batch:
            # In stages, later chunks of a prefill are those of other microbatches.
            fault = lengths.fault_of_batch(last_batch, chunked, last_batch.chunked_req)
        if fault is not None:
            return fault
        holders, pool = self._holders(requests, idle, lengths), self._pool()
        counted = self._scheduler.tree_cache.evictable_size() + self._scheduler.tree_cache.protected_size()
        if counted != len(pool.tree):
            return f"the tree counts {counted} slots, but holds {len(pool.tree)}"
        # Those of drafts go to reserves.
        known = [batch for batch in overlapped if batch.forward_mode.is_extend() or not self._unknown]
        fault = find_fault(pool, holders, list(_writes(known, requests, holders, moved)))
        if fault is None and has_window_pool(self._scheduler):
            records = [*(request.kv for request in requests), *(parked.kv for parked in idle.values())]
            fault = find_peer_fault(pool, holders, read_peers(self._scheduler, records))
        return fault

    def _requests(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> list[Req]:
        """Every request that holds a row, from all of SGLang's queues and batches."""
        scheduler = self._scheduler
        chunked = scheduler.chunked_req
        found = [
            *running_batch.reqs,
            *(last_batch.reqs if last_batch is not None else ()),
            *((chunked,) if chunked is not None else ()),
            *requests_of_other_batches(scheduler),
            *requests_in_transfer(scheduler),
            *scheduler.waiting_queue,
        ]
        return [request for request in {id(request): request for request in found}.values() if request.kv.holds_kv]

    def _marks(self, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None) -> dict[int, tuple]:
        """A mark for each request that changes whenever a round or the tree changes its row."""
        return {
            id(request): (evicted_of(request), request.kv.cache_protected_len)
            for request in self._requests(running_batch, last_batch)
        }

    def _holders(self, requests: Sequence[Req], idle: Mapping[Name, Conversation], lengths: Lengths) -> Holders:
        places = [(request.last_node, request.lock) for request in requests]
        places += [(parked.last_node, parked.lock) for parked in idle.values()]
        paths = [
            self._locked_path(frozen, *place) for frozen, place in zip(lengths.frozen.tolist(), places, strict=True)
        ]
        length, more = lengths.allocated, {}
        found = [(n, beams_of(request)) for n, request in enumerate(requests)]
        searches = [(n, beams) for n, beams in found if beams is not None and beams.member_rows is not None]
        if searches:
            length = length.copy()
            length[[n for n, _ in searches]] = [beams.prompt_len for _, beams in searches]
            others = [self._slots_of_beams(beams) for _, beams in searches]
            rows = [to_host(cast(torch.Tensor, beams.member_rows_cpu)) for _, beams in searches]
            numbers = np.array([n for n, _ in searches])
            more = {
                "more_rows": np.concatenate(rows),
                "more_rows_of": numbers.repeat([len(each) for each in rows]),
                "others": np.concatenate(others),
                "others_of": numbers.repeat([len(each) for each in others]),
            }
        return Holders(
            name=lengths.name,
            row=lengths.row,
            length=length,
            frozen=lengths.frozen,
            covered=np.array([len(path) for path in paths], np.int64),
            path=to_host(torch.cat(paths)) if paths else np.empty(0, np.int64),
            **more,
        )

    def _locked_path(self, frozen: int, node: NodeId, lock: TreeLock | None) -> torch.Tensor:
        """The tree's slots of the first `frozen` tokens, as far as a lock keeps them there."""
        tree = self._scheduler.tree_cache
        # An unlocked path may be evicted at any moment, so nothing vouches for what is frozen.
        if frozen <= 0 or tree.disable or lock is None or lock.node != node:
            return self._no_slots
        return tree.path_device_indices(node)[:frozen]

    def _slots_of_beams(self, beams: BeamGroup) -> np.ndarray:
        """Slots that beams share after their prompt, including those that no beam needs any more."""
        scheduler = self._scheduler
        if scheduler.enable_overlap and scheduler.req_to_token_pool.req_to_token.is_cuda:
            # The queued step changes, on its own stream, which beams share what.
            scheduler.forward_stream.synchronize()
        rows = scheduler.req_to_token_pool.req_to_token[
            beams.all_rows, beams.prompt_len : beams.leader.kv.kv_allocated_len
        ]
        staged = [entry.old_mapping.flatten() for entry in beams.pending_orphans]
        return np.unique(to_host(torch.cat([rows.flatten(), *staged])))

    def _pool(self) -> Pool:
        scheduler = self._scheduler
        allocator, rows = row_allocator(scheduler.token_to_kv_pool_allocator), scheduler.req_to_token_pool
        tree = scheduler.tree_cache
        return Pool(
            page_size=allocator.page_size,
            pages=allocator.size // allocator.page_size,
            free=to_host(cast(torch.Tensor, allocator.get_all_free_pages())),
            tree=to_host(tree.all_values_flatten()),
            table=rows.req_to_token,
            free_rows=rows.free_slots,
        )


def _writes(
    queued: Sequence[ScheduleBatch], requests: Sequence[Req], holders: Holders, moved: set[int]
) -> Iterator[Write]:
    """What queued steps write for rows that are held as they were when the steps were planned."""
    if not queued:
        return
    unmoved = {n for n, request in enumerate(requests) if id(request) not in moved}
    rows_of = [
        *enumerate(holders.row.tolist()),
        *zip(holders.more_rows_of.tolist(), holders.more_rows.tolist(), strict=True),
    ]
    holder_of = {row: number for number, row in rows_of if number in unmoved}
    for batch in queued:
        if batch.out_cache_loc is None:
            continue
        slots, rows = to_host(batch.out_cache_loc), batch.req_pool_indices_cpu.tolist()
        counts = batch.extend_lens if batch.forward_mode.is_extend() else [1] * len(rows)
        ends = np.cumsum(counts)
        for row, count, end in zip(rows, counts, ends, strict=True):
            if row in holder_of:
                yield Write(holder_of[row], slots[end - count : end])
