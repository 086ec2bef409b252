"""Compaction: what happens to a row once the kept tokens are known. Twin of `compact_triton`.

Three ways to make the end of a request's private slots empty:

    remap   permutes the row, so that the kept slots come first; moves no K/V. Needs slots that can be freed one by
            one (page size 1) and one kept set for all heads.
    slide   copies every kept token's K/V forward to the first free place; tokens stay in order.
    fill    copies only the kept tokens behind the new length, into the holes before it; fewer copies, order is lost.

Attention over a set of keys does not depend on their order, and neither does a score (the position of a key is in its
phase). What depends on it is which tokens are newest: see `needs_order`.

Kept sets come as [R, keep] (one set for all heads), [R, H_kv, keep] or [R, L, H_kv, keep], ascending. Symbols: R
requests, L layers, H_kv KV heads, N private tokens of the longest request, M moves of one kept set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRATEGIES = ("slide", "fill")


def needs_order(recent: int, interval: int) -> bool:
    """Whether a later round relies on the order of what this one keeps.

    The newest `recent` tokens are taken from the end of the row. Those that came since the last round, `interval` at
    least, are in order anyway.
    """
    return recent > interval


def remap(slots: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Orders each request's private slots: kept ones first, then evicted ones, both in row order.

    Args:
        slots: [R, N] int32 or int64, private slots of each request, right-padded with anything.
        kept: [R, keep] int64, ascending indices into the private tokens.

    Returns:
        [R, N] as `slots`: columns [0, keep) are the kept slots, [keep, length) the evicted ones, the rest padding.
    """
    stays = torch.zeros_like(slots, dtype=torch.bool).scatter_(1, kept, True)
    place = torch.where(stays, stays.cumsum(1), kept.shape[1] + (~stays).cumsum(1)) - 1
    return torch.empty_like(slots).scatter_(1, place, slots)


def unchanged_start(kept: torch.Tensor) -> torch.Tensor:
    """How many private tokens stay where they are before the first that some set drops.

    Args:
        kept: [R, ..., keep] int64, ascending indices into the private tokens.

    Returns:
        [R] int64.
    """
    same = kept == torch.arange(kept.shape[-1], device=kept.device)
    return same.long().cumprod(-1).sum(-1).view(len(kept), -1).amin(1)


def list_moves(slots: torch.Tensor, kept: torch.Tensor, strategy: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies that bring each kept set to the front of its request's private slots.

    Args:
        slots: [R, N] int32 or int64, private slots of each request in row order, right-padded.
        kept: [R, keep], [R, H_kv, keep] or [R, L, H_kv, keep] int64.
        strategy: "slide" or "fill".

    Returns:
        sources, targets: [R, ..., M] slots, dims as of `kept`; equal slots are no move. M is `keep` for "slide"
        and min(keep, N - keep) for "fill". No slot is the target of two moves; for "fill" no target is a source, for
        "slide" the source of move m is no target of a move before m.

    Raises ValueError on an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    keep = kept.shape[-1]
    first = torch.arange(keep, device=kept.device).expand_as(kept)
    source, target = (kept, first) if strategy == "slide" else _fill(kept, first, slots.shape[1])
    rows = slots.view(slots.shape[0], *[1] * (kept.ndim - 2), -1).expand(*kept.shape[:-1], -1)
    return rows.gather(-1, source), rows.gather(-1, target)


def _fill(kept: torch.Tensor, first: torch.Tensor, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [R, ..., M] of tokens behind the new length and of the holes that they go to; equal where none is left.

    Before kept token i lie kept[i] - i holes, so the hole of rank q is at q plus the number of kept tokens that have
    at most q holes before them.
    """
    keep = kept.shape[-1]
    most = min(keep, columns - keep)
    rank = first[..., :most].contiguous()
    target = rank + torch.searchsorted((kept - first).contiguous(), rank, right=True)
    stay = torch.searchsorted(kept.contiguous(), torch.full_like(kept[..., :1], keep))  # [R, ..., 1], of the kept
    which = stay + rank
    source = kept.gather(-1, which.clamp_max(keep - 1))
    return torch.where(which < keep, source, 0), torch.where(which < keep, target, 0)


def move_naive(buffers: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copies K/V rows in place. All rows of a buffer are read before any is written.

    Args:
        buffers: K or V of each layer, [num_slots, H_kv, head_dim], any dtype: bytes are copied.
        sources, targets: from `list_moves`.
    """
    for layer, buffer in enumerate(buffers):
        content = buffer.view(torch.uint8) if buffer.element_size() == 1 else buffer
        per_layer = sources.ndim == 4
        source, target = (sources[:, layer], targets[:, layer]) if per_layer else (sources, targets)
        source, target = source.long(), target.long()
        moving = source != target
        if source.ndim == 2:
            content.index_copy_(0, target[moving], content.index_select(0, source[moving]))
        else:
            head = torch.arange(source.shape[1], device=source.device)[:, None].expand_as(source)[moving]
            content[target[moving], head] = content[source[moving], head]
