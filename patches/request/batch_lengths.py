"""Lengths of the rows of a batch after rounds have shortened some of them.

SGLang part: `seq_lens`, `seq_lens_cpu` and `seq_lens_sum` of `ScheduleBatch` (sglang/srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from sglang_triattn.patches.model.pinned import to_device
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.rounds.plan import Plan

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch


class BatchLengths(NamedTuple):
    """Physical lengths of a batch's rows.

    Attributes:
        on_device: [rows] of the dtype that the batch has them in, on its device.
        on_host: [rows] on the CPU; None if the batch has none, as with drafts and some attention backends.
        total: their sum; None without `on_host`.
    """

    on_device: torch.Tensor
    on_host: torch.Tensor | None
    total: int | None

    def write(self, batch: ScheduleBatch) -> None:
        """Gives them to the batch; `orig_seq_lens`, the logical length, stays. Only assigns.

        The batch's tensors are replaced, never written, because queued work still refers to the old ones.
        """
        batch.seq_lens = self.on_device
        # SGLang allows None for both, although it declares neither so.
        batch.seq_lens_cpu = self.on_host  # pyright: ignore[reportAttributeAccessIssue]
        batch.seq_lens_sum = self.total  # pyright: ignore[reportAttributeAccessIssue]


def lengths_without(batch: ScheduleBatch, evicted: Sequence[int]) -> BatchLengths:
    """The lengths of a batch's rows without `evicted` tokens of each request."""
    # Members of a beam search come after the requests, and have no rounds.
    shift = [*evicted, *[0] * (len(batch.seq_lens) - len(evicted))]
    on_device = (batch.seq_lens - to_device(shift, batch.seq_lens.device)).to(batch.seq_lens.dtype)
    if batch.seq_lens_cpu is None:
        return BatchLengths(on_device, None, None)
    on_host = batch.seq_lens_cpu - batch.seq_lens_cpu.new_tensor(shift)
    return BatchLengths(on_device, on_host, int(on_host.sum()))


FEW = 8
"""Rounds for which a search of the batch costs less than a list of all its places."""


def shortened(batch: ScheduleBatch, rounds: Sequence[tuple[CompressedRow, Plan]]) -> BatchLengths:
    """A batch's lengths after `rounds` of some of its requests; others may be among them."""
    found = list(_places(batch.reqs, rounds))
    places, evicted = [place for place, _ in found], [lost for _, lost in found]
    index, lost = to_device([places, evicted], batch.seq_lens.device)
    on_device = batch.seq_lens.index_add(0, index, lost.to(batch.seq_lens.dtype), alpha=-1)
    if batch.seq_lens_cpu is None:
        return BatchLengths(on_device, None, None)
    known = batch.seq_lens_cpu
    on_host = known.index_add(0, torch.tensor(places, dtype=torch.int64), known.new_tensor(evicted), alpha=-1)
    return BatchLengths(on_device, on_host, int(on_host.sum()))


def _places(requests: Sequence[Req], rounds: Sequence[tuple[CompressedRow, Plan]]) -> Iterator[tuple[int, int]]:
    """(place in the batch, tokens evicted) of each round of one of its requests."""
    known = None if len(rounds) <= FEW else dict(zip(requests, range(len(requests)), strict=True))
    for row, plan in rounds:
        try:
            yield requests.index(row.request) if known is None else known[row.request], plan.evicted_tokens
        except (ValueError, KeyError):
            continue
