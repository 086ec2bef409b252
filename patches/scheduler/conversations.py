"""Compressed rows of idle conversations, so that the next turn prefills only its new tokens.

SGLang parts: `Req.kv` and its tree lock (sglang/srt/managers/schedule_batch.py), `UnifiedRadixCache.session_records`,
through which SGLang's own books count rows that no request holds.

A request that names a conversation leaves its row here when it ends: slots, the tree lock on the frozen prefix, and the
computed token ids, evicted ones included. The next request of that name whose ids extend them resumes after the row, as
a prefill does between two chunks (`chunked_prefill`). If they differ only among the newest tokens, which lie in order,
the row is cut before the first that differs. Any other request starts anew; the row stays until it has been answered.

With --triattention-conversations auto, so does every request without a name whose row is compressed. The row is found
by its ids (`row_index`), unless the tree holds as many of them.

Who owns a row:

    running request --park--> conversation --acquire--> request at admission --commit--> running request
                                   |     <--rollback, if not admitted--
                                   +--drop: least recently used first, when others need memory or rows; too old
                                   +--forgotten by a flush

Decisions depend on token counts, ids and the order of requests, which are equal on all tensor-parallel ranks, and on
rank 0's clock.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from sglang_triattn.errors import type_and_line
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.chunked_prefill import show_all_ids
from sglang_triattn.patches.request.compressed import (
    compression_of,
    compressions_of,
    tokens_tell_all,
    write_tree_rule,
)
from sglang_triattn.patches.request.fields import rows_of
from sglang_triattn.patches.request.integrity import all_or_nothing
from sglang_triattn.patches.request.linear_states import drop_looked_up, seen_by_state
from sglang_triattn.patches.request.row import (
    count_as_cached,
    free_tail,
    leave_row,
    take_row,
    write_row_length,
)
from sglang_triattn.patches.request.window_pool import WindowPool, has_window_pool
from sglang_triattn.patches.scheduler.circuit_breaker import check_survivable
from sglang_triattn.patches.scheduler.idle_rows import (
    Conversation,
    Name,
    free_slots,
    least_resumed,
    record_for_turn,
    resumable_length,
    reuse_key,
    unfit,
)
from sglang_triattn.request.lifecycle import DIVERGED, LOST, NEW, RESUMED, CompressedRequest, Stage
from sglang_triattn.request.row_index import RowIndex, block_hashes
from sglang_triattn.rounds.plan import Report

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo

    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)

REMEMBERED = 4096
"""How many dropped conversations are remembered, so that their next turn is reported as lost."""


ROWS_PER_STEP = 128
"""Rows that are kept free while requests wait, more than one prefill step usually admits; a beam takes one each."""


class Conversations:
    """All idle conversations of a scheduler, least recently used first.

    Attributes:
        resumed: turns that resumed a row since the server started.
        windows: the window layers' own KV pool, if they have one.
    """

    def __init__(self, ttl: int) -> None:
        self._ttl = ttl
        self._scheduler: Scheduler
        self._idle: OrderedDict[Name, Conversation] = OrderedDict()
        self._lost: OrderedDict[str, None] = OrderedDict()
        # The row that the request under admission has acquired, and its name.
        self._acquired: tuple[Name, Conversation] | None = None
        # Rows without a client's name.
        self._index = RowIndex()
        self._number = 0
        self.resumed = 0
        self.windows: WindowPool | None = None

    @property
    def parked(self) -> int:
        """Idle rows now."""
        return len(self._idle)

    def hooks(self) -> list[Hook]:
        return [
            Hook(
                "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.session_records",
                "after",
                self._add_records,
                "self",
                why="counts conversations' rows in SGLang's own books",
            ),
            Hook(
                "sglang.srt.managers.scheduler.Scheduler.flush_cache",
                "after",
                self._on_flush,
                "self empty_cache",
                why="forgets conversations whose memory was flushed",
            ),
        ]

    def attach(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.windows = WindowPool(scheduler) if has_window_pool(scheduler) else None

    def on_arrival(self, request: Req) -> None:
        """For an arriving request that names a conversation: drops those that have expired, and notes the time."""
        if compression_of(request).conversation is None:
            return
        group = self._scheduler.dp_tp_group
        now = time.monotonic()
        if group.world_size > 1:
            now = cast(float, group.broadcast_object(now, src=0))
        for name, idle in list(self._idle.items()):
            if idle.used is not None and idle.used + self._ttl < now:
                self._drop(name)
        compression_of(request).arrived_at = now

    def is_continued(self, request: Req) -> bool:
        """Whether an arriving request continues a conversation, as far as is known."""
        return compression_of(request).conversation is not None or self.find(request) is not None

    def find(self, request: Req) -> tuple[Name, int] | None:
        """The row that a waiting request may resume, and after how many of its token ids; None if there is none.

        A row that is found by tokens is the one that saves most, among equal ones the one that was left last.
        """
        compression = compression_of(request)
        if (name := compression.conversation) is not None:
            idle = self._idle.get(name)
            length = 0 if idle is None else resumable_length(idle, request, self.windows)
            return (name, length) if length else None
        if not compression.options.auto or not self._index or request.session is not None:
            return None
        if compression.block_hashes is None:
            compression.block_hashes = block_hashes(request.origin_input_ids, reuse_key(request))
        best = None
        for name in self._index.candidates(compression.block_hashes):
            length = resumable_length(self._idle[name], request, self.windows)
            if length > (0 if best is None else best[1]):
                best = name, length
        return best

    def acquire(self, request: Req) -> bool:
        """Gives a waiting request its conversation's row for one attempt at admission; False if there is none."""
        compression = compression_of(request)
        if not compression.keeps_row or compression.stage is not Stage.ARRIVED or compression.start is not None:
            return False
        name = compression.conversation
        try:
            found = self.find(request)
            if found is None:
                return False
            name, length = found
            return self._acquire(request, name, length)
        except Exception as error:
            self._survive(error, f"the conversation {shown(name)} could not be resumed, and starts anew")
            if self._acquired is not None:
                self.rollback(request)
                # The scheduler had looked the prompt up before.
                show_all_ids(request)
                request.init_next_round_input(self._scheduler.tree_cache)
            return False

    def _acquire(self, request: Req, name: Name, length: int) -> bool:
        idle, compression = self._idle[name], compression_of(request)
        if compression.conversation is None and request.prefix_len + request.host_hit_length >= length:
            # The tree has as much, and exact.
            return False
        record = record_for_turn(idle, request, length, self._scheduler.tree_cache.page_size)
        refusal = unfit(idle, record, request, self._scheduler)
        if refusal is not None:
            self._refuse(request, refusal)
            return False
        if length < len(idle.ids):
            idle.cut(length, self._scheduler)
        self._acquired = name, self._take(name)
        compression.acquire(record)
        drop_looked_up(self._scheduler, request.kv)
        take_row(request, idle.kv, idle.last_node)
        return True

    def _take(self, name: Name) -> Conversation:
        idle = self._idle.pop(name)
        if isinstance(name, int):
            self._index.discard(name)
        return idle

    def _keep(self, name: Name, idle: Conversation) -> None:
        self._idle[name] = idle
        if isinstance(name, int):
            self._index.add(name, idle.ids, idle.least, idle.owner)

    def _refuse(self, request: Req, sentence: str) -> None:
        """Ends a waiting request with an error, as SGLang ends one at its arrival; the conversation keeps its row."""
        request.set_finish_with_abort(sentence)
        # SGLang has replaced the prompt.
        request.full_untruncated_fill_ids = array("q")
        request.init_next_round_input(self._scheduler.tree_cache)

    def rollback(self, request: Req) -> None:
        """Gives the row back to its conversation, because the attempt failed."""
        compression = compression_of(request)
        # Set: an attempt has begun.
        (name, idle), self._acquired = cast("tuple[Name, Conversation]", self._acquired), None
        self._keep(name, idle)
        if compression.stage is Stage.ACQUIRED:
            compression.rollback()
        leave_row(request)

    def commit(self, request: Req) -> None:
        """Makes an acquired row the admitted request's own, and notes how its conversation started."""
        compression = compression_of(request)
        acquired, self._acquired = self._acquired, None
        start = RESUMED if acquired is not None else self._start_of(compression, request.to_finish is not None)
        compression.admit(len(request.origin_input_ids), start)
        write_tree_rule(request)
        if acquired is not None:
            idle, self.resumed = acquired[1], self.resumed + 1
            # Admission has locked the same node for the request.
            self._scheduler.tree_cache.unlock(idle.lock)
            count_as_cached(request, idle.record.evicted_tokens)

    def _start_of(self, compression: CompressedRequest, refused: bool) -> str | None:
        """How a conversation starts with a request that did not resume its row.

        Args:
            refused: whether the request ends with an error before it computes anything.
        """
        name = compression.conversation
        if not compression.keeps_row or compression.start is not None:
            return compression.start
        if refused:
            return None
        if name is None:
            return NEW
        compression.replaces = self._idle.get(name)
        return self.start_without_row(name) if compression.replaces is None else DIVERGED

    def start_without_row(self, name: str) -> str:
        """How a conversation starts that has no row."""
        return LOST if name in self._lost else NEW

    def park(self, request: Req, report: Report) -> bool:
        """Takes over the row of a request that has ended; False if the row must be released.

        A request that starts anew under the name of a row replaces that row once it has been answered. Of requests that
        ran at the same time under one name, the first to end leaves its row.

        Args:
            report: on the request; `physical_length` entries of its row stay.
        """
        try:
            return self._park(request, report)
        except Exception as error:
            self._survive(error, "a conversation's row could not be kept")
            return compression_of(request).kept

    def _park(self, request: Req, report: Report) -> bool:
        compression, tree, physical = compression_of(request), self._scheduler.tree_cache, report.physical_length
        aborted = _was_aborted(request)
        if not compression.keeps_row or not request.finished():
            return False
        if not aborted:
            self._drop_replaced(compression)
        elif compression.start != RESUMED:
            # Its client has no turn before that could be lost.
            return False
        if compression.options.release or not tokens_tell_all(request) or compression.conversation in self._idle:
            return False
        if not compression.evicted_tokens and (compression.options.auto or not tree.disable):
            # All of it is exact, so the tree takes it, for everybody.
            return False
        if compression.options.auto and request.session is not None:
            return False
        if self.windows is not None and not self.windows.covers_window(request.kv, physical):
            return False
        ids = request.origin_input_ids + request.output_ids_through_stop
        if request.kv.holds_mamba:
            physical, logical = request.kv.kv_committed_len, seen_by_state(request)
            if logical > len(ids):
                return False
            report = replace(report, physical_length=physical, logical_length=logical)
        ids = ids[: report.logical_length]
        least = least_resumed(request, ids, tree.page_size)
        with all_or_nothing(lambda: free_slots(self._scheduler)):
            free_tail(request.kv, physical, tree)
        write_row_length(request, physical)
        record = compression.park(report)
        idle = Conversation(
            kv=request.detach_kv(),
            lock=request.lock,
            last_node=request.last_node,
            ids=ids,
            least=least,
            owner=reuse_key(request),
            record=record,
            used=compression.arrived_at,
        )
        request.lock = None
        self._keep(self._name_for(compression), idle)
        return True

    def _name_for(self, compression: CompressedRequest) -> Name:
        if compression.conversation is None:
            self._number += 1
            return self._number
        self._lost.pop(compression.conversation, None)
        return compression.conversation

    def _drop_replaced(self, compression: CompressedRequest) -> None:
        """Drops the row of the name under which this request started anew."""
        name, replaced = compression.conversation, compression.replaces
        if name is not None and replaced is not None and self._idle.get(name) is replaced:
            self._drop(name)
        compression.replaces = None

    def drop_all(self) -> None:
        """Drops every conversation."""
        for name in list(self._idle):
            self._drop(name)

    def drop_one(self) -> bool:
        """Frees the memory of the least recently used conversation; False if there is none that can be dropped."""
        return bool(self._idle) and self._drop(next(iter(self._idle)))

    def make_rows(self, waiting: Sequence[Req]) -> bool:
        """Drops conversations until the requests that the next step may admit find rows; whether it dropped any.

        It spares conversations that a waiting request names. Of requests that cannot resume one, as many count as a
        step admits; rows for more of them would stand empty, while conversations that were dropped for them start anew.
        """
        rows = self._scheduler.req_to_token_pool
        available = rows.available_size()
        if not self._idle or not waiting or available >= ROWS_PER_STEP:
            return False
        needed = 0
        wanted: set[Name | None] = {compression.conversation for compression in compressions_of(waiting)}
        for request in waiting:
            name = self._waited_for(request)
            wanted.add(name)
            if name not in self._idle:
                needed += rows_of(request)
                if needed >= ROWS_PER_STEP:
                    break
        if available >= needed:
            return False
        unwanted = iter([name for name in self._idle if name not in wanted])
        dropped = False
        while rows.available_size() < needed and (name := next(unwanted, None)) is not None:
            dropped |= self._drop(name)
        return dropped

    def _waited_for(self, request: Req) -> Name | None:
        """The name of the row that a request waits for, whether or not it may resume it."""
        compression = compression_of(request)
        if compression.conversation is not None:
            return compression.conversation
        found = self.find(request)
        return None if found is None else found[0]

    def idle(self) -> dict[Name, Conversation]:
        """All idle rows by name."""
        return dict(self._idle)

    def records(self) -> dict[str, ReqKvInfo]:
        """SGLang's records of the idle rows, for its own books."""
        return {f"triattention {shown(name)}": idle.kv for name, idle in self._idle.items()}

    def _drop(self, name: Name) -> bool:
        """Gives a conversation's row back; True if it has none then. If its slots cannot be freed, it keeps the row.

        Raises:
            IntegrityError: it failed halfway.
        """
        idle = self._idle.get(name)
        if idle is None:
            return True
        try:
            idle.free_slots(self._scheduler)
        except Exception as error:
            self._survive(error, "a conversation's row could not be freed")
            return False
        self._take(name)
        idle.free_row(self._scheduler)
        self._remember_lost(name)
        return True

    def _survive(self, error: Exception, what: str) -> None:
        check_survivable(self._scheduler, error)
        logger.warning("TriAttention: %s (%s)", what, type_and_line(error))

    def _remember_lost(self, name: Name) -> None:
        if isinstance(name, int):
            return
        self._lost[name] = None
        if len(self._lost) > REMEMBERED:
            self._lost.popitem(last=False)

    def _on_flush(self, flushed: bool, *_: object, **__: object) -> None:
        """Forgets every row after a flush; does nothing if SGLang refused the flush.

        Tree, slots and rows have been reset as a whole. No row is read, because a memory saver may have unmapped it.
        """
        if not flushed:
            return
        for name in self._idle:
            self._remember_lost(name)
        self._idle.clear()
        self._index.clear()

    def _add_records(self, records: dict, _: object) -> dict:
        return {**records, **self.records()}


def shown(name: Name | None) -> str:
    """A conversation in a message, and in SGLang's records: its name in quotes, or its number."""
    return f"number {name}" if isinstance(name, int) else repr(name)


def _was_aborted(request: Req) -> bool:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(request.finished_reason, FINISH_ABORT)
