"""Tensor parallelism: each rank scores its own heads, and a selection with one kept set merges them over the ranks.

SGLang part: `GroupCoordinator` (sglang/srt/distributed/parallel_state.py). Plans depend on token counts, which are
equal on all ranks, so every rank comes here for the same requests in the same order.

With attention data parallelism, the ranks of `dp_tp_group` hold the heads of one batch, and run its rounds. All ranks
of `tp_group` run every forward pass together, those of a launch included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.select import selection_named

if TYPE_CHECKING:
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    from sglang_triattn.patches.sglang_types import Scheduler


def own_heads(scheduler: Scheduler, q_heads: int) -> slice:
    """This rank's query heads, among all `q_heads` of the model."""
    group = scheduler.dp_tp_group
    count = q_heads // group.world_size
    return slice(group.rank_in_group * count, (group.rank_in_group + 1) * count)


class RankMerge:
    """Merges the importance of all ranks' heads, for a selection with one kept set.

    One gather on the current stream, then the same reduction in the same order on every rank: the result has equal bits
    everywhere, which a reduction in the network does not guarantee.
    """

    def __init__(self, group: GroupCoordinator, selection: str) -> None:
        self._group, self._merge = group, selection_named(selection).merge
        self._gathers = True

    def __call__(self, importance: torch.Tensor) -> torch.Tensor:
        if not self._gathers:
            return importance
        by_rank = self._group.all_gather(importance[None].contiguous(), dim=0)
        return by_rank.amax(0) if self._merge == "max" else by_rank.mean(0)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Returns importance unmerged while open: no rank then waits for one that failed."""
        self._gathers = False
        try:
            yield
        finally:
            self._gathers = True


def merge_over_ranks(scheduler: Scheduler, selection: str) -> RankMerge | None:
    """What merges the ranks' importance; None on a single rank, or if every head has its own kept set."""
    group = scheduler.dp_tp_group
    return None if group.world_size == 1 or not selection_named(selection).shared else RankMerge(group, selection)


@contextmanager
def agreed(scheduler: Scheduler) -> Iterator[None]:
    """Makes every rank of every stage refuse with a TriAttentionError if one of them does.

    Otherwise the others would wait for it at the next gather, and the launch with them.
    """
    refusal = None
    try:
        yield
    except TriAttentionError as error:
        refusal = str(error)
    first = refusal
    for group in (scheduler.tp_group, scheduler.pp_group):
        gathered = [] if group.world_size == 1 else group.all_gather_object(first)
        first = next((each for each in (refusal, first, *gathered) if each is not None), None)
    if first is not None:
        raise TriAttentionError(first)
