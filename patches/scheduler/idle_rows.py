"""Idle rows: who may reuse them, in which order they make way, and how SGLang gets them back.

SGLang parts: the tree lock and slots of a row (`UnifiedRadixCache`), the row table (`ReqToTokenPool`).
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.request.bounds import logical_end
from sglang_triattn.patches.request.compressed import (
    compression_of,
    frozen_of,
    ids_determine_kv,
    settings_in_use,
    settings_of,
)
from sglang_triattn.patches.request.fields import wants_prompt_logprobs
from sglang_triattn.patches.request.integrity import all_or_nothing, unbroken
from sglang_triattn.patches.request.linear_states import free_state
from sglang_triattn.patches.request.row import free_tail
from sglang_triattn.patches.request.window_pool import WindowPool, row_allocator
from sglang_triattn.request.options import KEY
from sglang_triattn.request.row_index import RowIndex, block_hashes, common_length, row_hash
from sglang_triattn.request.row_record import RowRecord
from sglang_triattn.rounds.plan import ceil_align, frozen_length, max_kv_tokens

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.base_prefix_cache import TreeLock
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId

    from sglang_triattn.patches.sglang_types import Scheduler

REMEMBERED = 4096
"""How many names of dropped rows are remembered."""

Name = str | int
"""A client's name of a conversation, or the number of a row that is found by its tokens."""


def shown(name: Name | None) -> str:
    """A conversation in a message, and in SGLang's records: its name in quotes, or its number."""
    return f"number {name}" if isinstance(name, int) else repr(name)


@dataclass(eq=False)
class Conversation:
    """One idle row.

    Attributes:
        name: what it is filed under.
        kv: SGLang's record of the row; `kv_allocated_len` is its physical length.
        lock: the tree lock on its frozen prefix, which ends at `last_node`.
        ids: token ids of its logical positions.
        least: the fewest of them after which it can be resumed: the entries after them are cut off.
        owner: `reuse_key` of the request that left it.
        record: what rounds did to it.
        used: when its last turn arrived, in seconds; None for a row that does not expire.
        found_under: the `row_hash` by which requests without a name find it; None if they do not.
        spare: whether it is a copy of a row with which its conversation has gone on, in case that the turn fails or is
            repeated.
        previous: the spare from before the turn that left this row.
    """

    name: Name
    kv: ReqKvInfo
    lock: TreeLock | None
    last_node: NodeId
    ids: array
    least: int
    owner: tuple
    record: RowRecord
    used: float | None
    found_under: int | None
    spare: bool = False
    previous: Conversation | None = None

    def cut(self, length: int, scheduler: Scheduler) -> None:
        """Cuts it after `length` token ids, at least `least`; if this raises anything but IntegrityError, nothing has
        changed."""
        entries = length - self.record.evicted_tokens
        with all_or_nothing(lambda: free_slots(scheduler)):
            free_tail(self.kv, entries, scheduler.tree_cache)
        self.kv.kv_committed_len = self.kv.kv_allocated_len = entries
        self.ids = self.ids[:length]
        self.record.inputs = self.record.inputs.cut(entries, scheduler.tree_cache.page_size)

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


class IdleRows:
    """Idle rows by name, in the order in which they make way: spares, then the least recently used."""

    def __init__(self) -> None:
        self._rows: OrderedDict[Name, Conversation] = OrderedDict()
        self._index = RowIndex()
        self._number = 0

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[Conversation]:
        """The rows now; it stays as it is while rows come and go."""
        return iter(list(self._rows.values()))

    def __contains__(self, name: Name | None) -> bool:
        return name in self._rows

    def get(self, name: Name | None) -> Conversation | None:
        """The row of a name, if it is here."""
        return None if name is None else self._rows.get(name)

    def holds(self, idle: Conversation | None) -> bool:
        """Whether a row is still here."""
        return idle is not None and self._rows.get(idle.name) is idle

    def first(self) -> Conversation | None:
        """The row that makes way first; None if there is none."""
        return next(iter(self._rows.values()), None)

    def next_number(self) -> int:
        """A name that no row has had."""
        self._number += 1
        return self._number

    def add(self, idle: Conversation) -> None:
        """Files a row by its name, and by its ids if these are what it is found by."""
        self._rows[idle.name] = idle
        self._rows.move_to_end(idle.name, last=not idle.spare)
        if idle.found_under is not None:
            # Not computed here: a request that waits for memory has its row taken and added in every step.
            self._index.add(cast(int, idle.name), idle.found_under)

    def take(self, idle: Conversation) -> Conversation:
        """Removes a row."""
        del self._rows[idle.name]
        if idle.found_under is not None:
            self._index.discard(cast(int, idle.name))
        return idle

    def clear(self) -> None:
        """Forgets all rows."""
        self._rows.clear()
        self._index.clear()

    def of_name(self, name: str) -> Iterator[Conversation]:
        """The rows with which a conversation may go on, the latest first."""
        latest = self._rows.get(name)
        if latest is not None:
            yield latest
            if latest.previous is not None and self.holds(latest.previous):
                yield latest.previous

    def of_text(self, request: Req) -> Iterator[Conversation]:
        """The rows without a client's name with which a prompt may go on, those that share most of it first."""
        if not self._index:
            return
        compression = compression_of(request)
        if compression.block_hashes is None:
            compression.block_hashes = block_hashes(request.origin_input_ids, reuse_key(request))
        for name in self._index.candidates(compression.block_hashes):
            yield self._rows[name]


class LostNames:
    """Clients' names of the rows that were dropped last, whose next turns are reported as lost."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def add(self, name: Name) -> None:
        """Notes that the row of a name was dropped; numbers are not noted."""
        if isinstance(name, int):
            return
        self._names[name] = None
        if len(self._names) > REMEMBERED:
            self._names.popitem(last=False)

    def discard(self, name: str) -> None:
        """Forgets a name, if it is there."""
        self._names.pop(name, None)


def free_slots(scheduler: Scheduler) -> int:
    """Free slots of all KV pools."""
    allocator = scheduler.token_to_kv_pool_allocator
    windows = getattr(allocator, "swa_available_size", lambda: 0)
    return row_allocator(allocator).available_size() + windows()


def least_resumed(request: Req, ids: array, page_size: int) -> int:
    """The fewest of a row's token ids after which it can be resumed, once its request leaves it.

    From there on its entries lie in the order of the text, and a window layer sees no others. A state cannot be
    shortened at all.
    """
    settings, compression = settings_in_use(request), compression_of(request)
    if request.kv.holds_mamba:
        return len(ids)
    record = compression.held_record
    scattered = max(record.scattered_len, record.unordered_len, record.inputs.end)
    first = max(frozen_of(request, settings, page_size, compression), scattered + settings.window if scattered else 0)
    return min(first + record.evicted_tokens, len(ids))


def hash_if_unnamed(request: Req, ids: array, least: int) -> int | None:
    """The `row_hash` of the row that a request leaves; None where a client's name finds it."""
    compression = compression_of(request)
    if compression.conversation is not None:
        return None
    return row_hash(ids, least, reuse_key(request), compression.block_hashes)


def resumable_length(idle: Conversation, request: Req, windows: WindowPool | None) -> int:
    """After how many of an idle row's token ids a request's prompt may go on; 0 if it may not reuse the row.

    Args:
        windows: the window layers' own KV pool, if they have one.
    """
    if (
        wants_prompt_logprobs(request)
        or not ids_determine_kv(request)
        or idle.owner != reuse_key(request)
        or settings_of(request) is None
    ):
        return 0
    ids = request.origin_input_ids + request.output_ids
    # SGLang computes at least the last token of a prompt.
    length = min(common_length(ids, idle.ids), len(ids) - 1)
    if length < idle.least:
        return 0
    entries = length - idle.record.evicted_tokens
    return length if windows is None or windows.covers_window(idle.kv, entries) else 0


def record_for_turn(idle: Conversation, request: Req, length: int, page_size: int) -> RowRecord:
    """The record of a row that a request resumes after `length` token ids: what it adds is input, which may stay."""
    first = length - idle.record.evicted_tokens
    inputs = idle.record.inputs.cut(first, page_size)
    if settings_in_use(request).keeps_inputs:
        new = len(request.origin_input_ids) + len(request.output_ids) - length
        inputs = inputs.appended(first, first + new, page_size)
    return replace(idle.record, inputs=inputs)


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
    most = max_kv_tokens(
        settings,
        frozen=frozen,
        logical_end=logical_end(request) - record.evicted_tokens,
        evicted_before=record.evicted_tokens,
        page_size=page_size,
        inputs=record.inputs,
    )
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
