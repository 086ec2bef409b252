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
                                   |     <--rollback, if not admitted--          |
                                   |     <--a copy, its spare--------------------+
                                   +--drop: spares and the least recently used first, when others need memory or rows;
                                   |        too old
                                   +--forgotten by a flush

While memory allows it, a copy of a row that is resumed stays idle (`row_copy`). If the turn fails, the conversation
still has it; a second request of the same text resumes it, as a branch; and once the turn has been answered, it serves
one that repeats that turn, until the next turn comes.

Decisions depend on token counts, ids and the order of requests, which are equal on all tensor-parallel ranks, and on
rank 0's clock.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from sglang_triattn.errors import type_and_line
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.chunked_prefill import show_all_ids
from sglang_triattn.patches.request.compressed import (
    compression_of,
    compressions_of,
    ids_determine_kv,
    write_tree_rule,
)
from sglang_triattn.patches.request.fields import rows_of, was_aborted
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
    IdleRows,
    LostNames,
    Name,
    free_slots,
    hash_if_unnamed,
    least_resumed,
    record_for_turn,
    resumable_length,
    reuse_key,
    shown,
    unfit,
)
from sglang_triattn.patches.scheduler.row_copy import RowCopier
from sglang_triattn.request.lifecycle import DIVERGED, LOST, NEW, RESUMED, CompressedRequest, Stage
from sglang_triattn.rounds.plan import Report

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo

    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)

ROWS_PER_STEP = 128
"""Rows that are kept free while requests wait, more than one prefill step usually admits; a beam takes one each."""


class Conversations:
    """All idle conversations of a scheduler, least recently used first.

    Attributes:
        resumed: turns that resumed a row since the server started.
        windows: the window layers' own KV pool, if they have one.
        copier: copies rows that are resumed; None if none are copied.
    """

    def __init__(self, ttl: int) -> None:
        self._ttl = ttl
        self._scheduler: Scheduler
        self._idle = IdleRows()
        self._lost = LostNames()
        # The row that the request under admission has acquired.
        self._acquired: Conversation | None = None
        # Copies of rows that have slots, but no K/V yet, and what copies it.
        self._unfinished: list[tuple[Conversation, Callable[[], None]]] = []
        self.resumed = 0
        self.windows: WindowPool | None = None
        self.copier: RowCopier | None = None

    @property
    def parked(self) -> int:
        """Idle rows that wait for a next turn now."""
        return sum(not idle.spare for idle in self._idle)

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
        for idle in self._idle:
            if idle.used is not None and idle.used + self._ttl < now:
                self._drop(idle)
        compression_of(request).arrived_at = now

    def is_continued(self, request: Req) -> bool:
        """Whether an arriving request continues a conversation, as far as is known."""
        return compression_of(request).conversation is not None or self.find(request) is not None

    def find(self, request: Req) -> tuple[Conversation, int] | None:
        """The row that a waiting request may resume, and after how many of its token ids; None if there is none.

        A row that is found by tokens is the one that saves most, among equal ones the one that was left last.
        """
        compression = compression_of(request)
        if (name := compression.conversation) is not None:
            lengths = ((idle, resumable_length(idle, request, self.windows)) for idle in self._idle.of_name(name))
            return next((found for found in lengths if found[1]), None)
        if not compression.options.auto or request.session is not None:
            return None
        best = None
        for idle in self._idle.of_text(request):
            length = resumable_length(idle, request, self.windows)
            if length > (0 if best is None else best[1]):
                best = idle, length
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
            idle, length = found
            name = idle.name
            return self._acquire(request, idle, length)
        except Exception as error:
            self._survive(error, f"the conversation {shown(name)} could not be resumed, and starts anew")
            if self._acquired is not None:
                self.rollback(request)
                # The scheduler had looked the prompt up before.
                show_all_ids(request)
                request.init_next_round_input(self._scheduler.tree_cache)
            return False

    def _acquire(self, request: Req, idle: Conversation, length: int) -> bool:
        compression = compression_of(request)
        if compression.conversation is None and request.prefix_len + request.host_hit_length >= length:
            # The tree has as much, and exact.
            return False
        record = record_for_turn(idle, request, length, self._scheduler.tree_cache.page_size)
        refusal = unfit(idle, record, request, self._scheduler)
        if refusal is not None:
            self._refuse(request, refusal)
            return False
        # It may be a copy.
        self.finish_copies()
        if length < len(idle.ids):
            idle.cut(length, self._scheduler)
        self._acquired = self._idle.take(idle)
        compression.acquire(record)
        drop_looked_up(self._scheduler, request.kv)
        take_row(request, idle.kv, idle.last_node)
        return True

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
        idle, self._acquired = cast(Conversation, self._acquired), None
        self._idle.add(idle)
        if compression.stage is Stage.ACQUIRED:
            compression.rollback()
        leave_row(request)

    def commit(self, request: Req, room: int = 0) -> None:
        """Makes an acquired row the admitted request's own, and notes how its conversation started.

        Args:
            room: slots that a copy of the row may take, see `RowCopier.copy`.
        """
        compression = compression_of(request)
        idle, self._acquired = self._acquired, None
        start = RESUMED if idle is not None else self._start_of(compression, request.to_finish is not None)
        compression.admit(len(request.origin_input_ids), start)
        write_tree_rule(request)
        if idle is None:
            return
        self.resumed += 1
        count_as_cached(request, idle.record.evicted_tokens)
        # The turn before is not repeated any more.
        self._drop(idle.previous)
        idle.previous = None
        if compression.conversation is not None and idle.name != compression.conversation:
            # It repeats a turn, in place of what that one left, which is not lost.
            self._drop(self._idle.get(compression.conversation))
            self._lost.discard(compression.conversation)
            idle.name = compression.conversation
        if not self._leave_copy(request, idle, room):
            # Admission has locked the same node for the request.
            self._scheduler.tree_cache.unlock(idle.lock)

    def _leave_copy(self, request: Req, idle: Conversation, room: int) -> bool:
        """Keeps a copy of the row that a request has resumed, with the row's lock; False if there is none."""
        if self.copier is None or idle.name in self._idle:
            return False
        try:
            copied = self.copier.copy(idle.kv, room)
        except Exception as error:
            self._survive(error, "the row of a conversation could not be copied")
            return False
        if copied is None:
            return False
        idle.kv, finish = copied
        idle.spare = True
        self._idle.add(idle)
        self._unfinished.append((idle, finish))
        compression_of(request).replaces = idle
        return True

    def finish_copies(self) -> None:
        """Copies the K/V of copies that lack it; called before any row changes that it comes from.

        The first token of the turn does not wait for it.
        """
        unfinished, self._unfinished = self._unfinished, []
        for idle, finish in unfinished:
            try:
                if self._idle.holds(idle):
                    finish()
            except Exception as error:
                self._survive(error, "the row of a conversation could not be copied")
                self._drop(idle)

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
            kept = self._park(request, report)
        except Exception as error:
            self._survive(error, "a conversation's row could not be kept")
            kept = compression_of(request).kept
        if not kept and request.finished():
            self._go_back_to_spare(compression_of(request))
        return kept

    def _park(self, request: Req, report: Report) -> bool:
        compression, tree, physical = compression_of(request), self._scheduler.tree_cache, report.physical_length
        if not compression.keeps_row or not request.finished():
            return False
        spare = self._spare_of(compression)
        if was_aborted(request):
            # Its client may send the turn again, or go on after what it has seen of the answer.
            if compression.start != RESUMED:
                # There is no turn before that could be lost.
                return False
        elif compression.start != RESUMED or compression.options.release:
            self._drop_replaced(compression)
        in_place = self._idle.get(compression.conversation)
        unusable = compression.options.release or not ids_determine_kv(request) or in_place not in (None, spare)
        if unusable or (compression.options.auto and request.session is not None):
            return False
        if not compression.evicted_tokens and (compression.options.auto or not tree.disable):
            # All of it is exact, so the tree takes it, for everybody.
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
        if spare is not None:
            self._idle.take(spare)
            spare.name, spare.spare = self._idle.next_number(), True
            self._idle.add(spare)
        idle = Conversation(
            name=self._name_for(compression),
            kv=request.detach_kv(),
            lock=request.lock,
            last_node=request.last_node,
            ids=ids,
            least=least,
            owner=reuse_key(request),
            record=record,
            used=compression.arrived_at,
            found_under=hash_if_unnamed(request, ids, least),
            previous=spare,
        )
        request.lock = None
        self._idle.add(idle)
        return True

    def _name_for(self, compression: CompressedRequest) -> Name:
        if compression.conversation is None:
            return self._idle.next_number()
        self._lost.discard(compression.conversation)
        return compression.conversation

    def keeps(self, compression: CompressedRequest) -> bool:
        """Whether the row from which a request went on, or that it was to replace, still waits for a next turn."""
        replaced = compression.replaces
        return self._idle.holds(replaced) and compression.conversation in (None, cast(Conversation, replaced).name)

    def _spare_of(self, compression: CompressedRequest) -> Conversation | None:
        """The copy of the row with which a request has gone on, while it is idle."""
        return compression.replaces if compression.start == RESUMED and self._idle.holds(compression.replaces) else None

    def _go_back_to_spare(self, compression: CompressedRequest) -> None:
        """Makes the copy of the row with which a request has gone on its conversation's row again."""
        spare = self._spare_of(compression)
        if spare is not None and self.keeps(compression):
            spare.spare = False
            self._idle.add(self._idle.take(spare))

    def _drop_replaced(self, compression: CompressedRequest) -> None:
        """Drops the row from which a request went on, or of the name under which it started anew."""
        if self.keeps(compression):
            self._drop(compression.replaces)
        compression.replaces = None

    def drop_all(self) -> None:
        """Drops every conversation."""
        for idle in self._idle:
            self._drop(idle)

    def drop_one(self) -> bool:
        """Frees the memory of a spare, or of the least recently used conversation; False if that is not possible."""
        first = self._idle.first()
        return first is not None and self._drop(first)

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
        unwanted = (idle for idle in self._idle if idle.name not in wanted)
        dropped = False
        while rows.available_size() < needed and (idle := next(unwanted, None)) is not None:
            dropped |= self._drop(idle)
        return dropped

    def _waited_for(self, request: Req) -> Name | None:
        """The name of the row that a request waits for, whether or not it may resume it."""
        compression = compression_of(request)
        if compression.conversation is not None:
            return compression.conversation
        found = self.find(request)
        return None if found is None else found[0].name

    def idle(self) -> dict[Name, Conversation]:
        """All idle rows by name."""
        return {idle.name: idle for idle in self._idle}

    def records(self) -> dict[str, ReqKvInfo]:
        """SGLang's records of the idle rows, for its own books."""
        return {f"triattention {shown(idle.name)}": idle.kv for idle in self._idle}

    def _drop(self, idle: Conversation | None) -> bool:
        """Gives a row back, with its `previous`; True if it is gone. If its slots cannot be freed, it is kept.

        Raises:
            IntegrityError: it failed halfway.
        """
        if idle is None or not self._idle.holds(idle):
            return True
        self._drop(idle.previous)
        try:
            idle.free_slots(self._scheduler)
        except Exception as error:
            self._survive(error, "a conversation's row could not be freed")
            return False
        self._idle.take(idle).free_row(self._scheduler)
        if not idle.spare:
            self._lost.add(idle.name)
        return True

    def _survive(self, error: Exception, what: str) -> None:
        check_survivable(self._scheduler, error)
        logger.warning("TriAttention: %s (%s)", what, type_and_line(error))

    def _on_flush(self, flushed: bool, *_: object, **__: object) -> None:
        """Forgets every row after a flush; does nothing if SGLang refused the flush.

        Tree, slots and rows have been reset as a whole. No row is read, because a memory saver may have unmapped it.
        """
        if not flushed:
            return
        for idle in self._idle:
            self._lost.add(idle.name)
        self._idle.clear()

    def _add_records(self, records: dict, _: object) -> dict:
        return {**records, **self.records()}
