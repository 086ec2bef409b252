"""Compaction: what happens to a row once the kept tokens are known.

Two ways, by page size. `remap` (page size 1) permutes the row and moves no K/V: the kept slots come first, the
others go back to the allocator. `slide` (larger pages) copies the kept tokens' K/V forward within the request's own
slots, so that whole pages at the end become empty.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def remap_naive(slots: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Orders each request's private slots: kept ones first, then evicted ones, both in row order.

    Args:
        slots: [R, N] int64, private slots of each request, right-padded with anything.
        kept: [R, keep] int64, ascending indices into the private tokens.
        lengths: [R] int64, private tokens of each request.

    Returns:
        [R, N] int64: columns [0, keep) are the kept slots, [keep, lengths[r]) the evicted ones, the rest padding.
    """
    column = torch.arange(slots.shape[1], device=slots.device)
    group = torch.where(column < lengths[:, None], 1, 2)
    group.scatter_(1, kept, 0)
    return slots.gather(1, group.argsort(dim=1, stable=True))


def slide_naive(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    kept: torch.Tensor,
) -> None:
    """Copies the kept tokens' K/V of every layer into each request's first slots, order kept, in place.

    A layer's kept rows are all read before any is written, so that a slot may be both source and destination; slots
    of different requests are disjoint because requests own their private slots alone.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool; v_buffers alike. Any dtype: rows are copied as
            they are.
        slots: [R, N] int64, private slots of each request in row order, right-padded.
        kept: [R, keep] int64, ascending indices into the private tokens.
    """
    source = slots.gather(1, kept).reshape(-1)
    target = slots[:, : kept.shape[1]].reshape(-1)
    for buffer in (*k_buffers, *v_buffers):
        buffer.index_copy_(0, target, buffer.index_select(0, source))
