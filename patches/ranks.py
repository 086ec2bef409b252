"""Tensor parallelism: each rank scores its own heads, and all of them keep the same tokens.

SGLang part: `GroupCoordinator` (sglang/srt/distributed/parallel_state.py). Plans are made of token counts, which are
equal on all ranks, so that every rank comes here for the same requests in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_triattn.stats import ModelShape


def own_heads(scheduler: Any, shape: ModelShape) -> slice:
    """The query heads of this rank among all of the model's."""
    group = scheduler.tp_group
    count = shape.num_q_heads // group.world_size
    return slice(group.rank_in_group * count, (group.rank_in_group + 1) * count)


def merge_over_ranks(scheduler: Any, selection: str) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Merges the importance of the ranks' heads for a selection with one kept set; None on a single rank.

    One gather on the current stream, then the same sum in the same order on every rank: the result has equal bits
    everywhere, which a reduction in the network does not promise.
    """
    group = scheduler.tp_group
    if group.world_size == 1:
        return None

    def merge(importance: torch.Tensor) -> torch.Tensor:
        parts = group.all_gather(importance[None].contiguous(), dim=0)
        return parts.amax(0) if selection == "union" else parts.mean(0)

    return merge
