"""Lengths that the census compares: of requests, rows, batches and idle conversations.

SGLang parts: `Req`, `ReqKvInfo` and `ScheduleBatch` (sglang/srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sglang_triattn.patches.request.compressed import evicted_of
from sglang_triattn.patches.request.fields import beams_of, end_of_chunk

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch

    from sglang_triattn.patches.scheduler.idle_rows import Conversation, Name


@dataclass(frozen=True)
class Lengths:
    """Lengths of all holders of a row: requests, then idle conversations, each identified by its number.

    Attributes:
        owners: a request, or the name or number of a conversation.
        in_prefill: [n] bool: whether a prefill has further chunks, or its last one is queued.
        reserve: whether rows may have slots after their computed entries, for drafted tokens. SGLang then leaves
            `orig_seq_lens` at the prompt's length.
        unknown: most tokens by which a batch's lengths and its requests' books may differ: those of a queued step,
            whose number of accepted drafts is not known yet.
        row, allocated, committed, frozen, evicted: [n] int64, by their own books.
        due: [n] int64: how many entries there must be, evicted ones included unless the row is in prefill.
    """

    owners: Sequence[Req | Name]
    reserve: bool
    unknown: int
    in_prefill: np.ndarray
    row: np.ndarray
    allocated: np.ndarray
    committed: np.ndarray
    frozen: np.ndarray
    evicted: np.ndarray
    due: np.ndarray

    def name(self, number: int) -> str:
        """Name of a holder in messages."""
        owner = self.owners[number]
        return f"conversation {owner!r}" if isinstance(owner, (str, int)) else f"request {owner.rid}"

    def fault(self) -> str | None:
        """Says what is wrong with the first row whose lengths do not fit; None if there is none."""
        found = self.committed + np.where(self.in_prefill, 0, self.evicted)
        in_order = (self.frozen >= 0) & (self.frozen <= self.committed) & (self.committed <= self.allocated)
        if not self.reserve:
            in_order &= self.committed == self.allocated
        right = in_order & (found == self.due)
        if right.all():
            return None
        n = int(right.argmin())
        has = f"{self.name(n)} has {self.allocated[n]} entries in row {self.row[n]}"
        if not in_order[n]:
            return f"{has}, {self.committed[n]} of them computed and {self.frozen[n]} frozen"
        if self.in_prefill[n]:
            return f"{has}, but is prefilled to {self.due[n]}"
        return f"{has} and {self.evicted[n]} evicted ones, but computed {self.due[n]} tokens"

    def fault_of_batch(self, batch: ScheduleBatch, *chunked: Req | None) -> str | None:
        """Says what is wrong with the lengths in a batch's tensors, for requests that continue; None if nothing is.

        `seq_lens`, `seq_lens_cpu` and `orig_seq_lens` are [batch]; members of a beam search come after the requests.

        Args:
            chunked: requests whose prefill has further chunks, or had some in this batch; SGLang takes them out of the
                batch before it reads these again.
        """
        continuing = [
            (index, request)
            for index, request in enumerate(batch.reqs)
            if not any(request is other for other in chunked)
            and request.kv.holds_kv
            and not request.finished()
            and not request.is_retracted
        ]
        if not continuing:
            return None
        number_of = {id(owner): number for number, owner in enumerate(self.owners)}
        at = np.array([index for index, _ in continuing])
        number = np.array([number_of[id(request)] for _, request in continuing])
        length = self.committed[number]
        wanted = {
            "req_pool_indices": self.row[number],
            "seq_lens_cpu": length,
            "seq_lens": length,
            "orig_seq_lens": length + self.evicted[number],
        }
        if self.reserve:
            del wanted["orig_seq_lens"]
        for field, expected in wanted.items():
            held = getattr(batch, field)
            if held is None:
                continue  # with drafts, the host may have no copy
            found = held.cpu().numpy()[at]
            wrong = abs(found - expected) > (0 if field == "req_pool_indices" else self.unknown)
            if not wrong.any():
                continue
            n = int(wrong.argmax())
            return (
                f"{field} of the batch is {found[n]} for {self.name(number[n])} in row {self.row[number[n]]}, "
                f"but by its own books {expected[n]}"
            )
        return None


def read_lengths(
    requests: Sequence[Req],
    idle: Mapping[Name, Conversation],
    in_prefill: set[int],
    queued: set[int],
    *,
    reserve: bool = False,
    unknown: int = 0,
) -> Lengths:
    """Reads the lengths of requests, and of idle conversations by their names.

    Args:
        in_prefill: ids of requests whose prefill has further chunks, or whose last chunk is queued.
        queued: ids of requests for which a queued step computes a token whose result they do not know yet.
        reserve, unknown: see `Lengths`.
    """
    figures = [
        (*_books(request.kv), evicted_of(request), _due(request, id(request) in in_prefill, id(request) in queued))
        for request in requests
    ]
    figures += [(*_books(parked.kv), parked.record.evicted_tokens, len(parked.ids)) for parked in idle.values()]
    filling = [id(request) in in_prefill for request in requests] + [False] * len(idle)
    columns = np.array(figures, np.int64).reshape(-1, 6).T
    return Lengths([*requests, *idle], reserve, unknown, np.array(filling, bool), *columns)


def _books(kv: ReqKvInfo) -> tuple[int | None, int, int, int]:
    return kv.req_pool_idx, kv.kv_allocated_len, kv.kv_committed_len, kv.cache_protected_len


def _due(request: Req, in_prefill: bool, ahead: bool) -> int:
    if in_prefill:
        # SGLang sees its ids without the evicted ones.
        return end_of_chunk(request)
    beams = beams_of(request)
    # A beam search counts what its queued steps select, its leader only what it knows.
    generated = len(request.output_ids) + ahead if beams is None else beams.num_generated
    return len(request.origin_input_ids) + generated - 1
