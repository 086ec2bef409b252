"""Compaction: what happens to a row once the kept tokens are known. Reference of the kernels beside it.

Three ways to make as many of a request's private slots empty as it loses tokens:

    remap   permutes the row, so that the kept slots come first; moves no K/V. Needs slots that can be freed one by
            one (page size 1) and one kept set for all heads.
    slide   copies every kept token's K/V forward to the first free place; tokens stay in order.
    fill    empties one stretch of the row, and copies only the kept tokens of that stretch, into the holes around it.

Attention over a set of keys does not depend on their order, and neither does a score (the position of a key is in its
phase). What depends on it is which tokens are newest. They stay in every head, so their slots are common to all heads,
and `fill` can leave their K/V alone: it cuts a stretch out of the row that ends before them, and they move up in the
row, which is a list of slots. The private part of a row, cut at column keep - recent, where `fill` copies least:

    before  0                      cut                     length - recent              length
            |-- older, any order ---|-- left the newest -----|-- newest, in order -------|
                    holes  <-- kept tokens of all heads
    after   |-- older, any order ---|-- newest, in order ----|      the slots between are free

Whole pages can be cut out only where the cut begins a page and the request loses a multiple of the page size: see
`cut_column`. A cut may lie further in front than keep - recent; then it is the stretch behind it that is emptied, and
there are holes on both sides. Else K/V is filled in from the end of the row, where the newest tokens are, and their
order is lost: see `needs_order`.

Kept sets come as [R, num_kept] (one set for all heads), [R, H_kv, num_kept] or [R, L, H_kv, num_kept], ascending.
Symbols: R requests, L layers, H_kv KV heads, N private tokens of the longest request, M moves of one kept set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRATEGIES = ("slide", "fill")


def cut_column(num_kept: int, recent: int, frozen: int, evicted: int, page_size: int) -> int | None:
    """The last private column at which `fill` can cut whole pages out of a row without a copy of its newest tokens.

    Args:
        num_kept: private tokens that stay, the newest `recent` among them.
        frozen: first private position of the row.
        evicted: private tokens that do not stay.

    Returns:
        0 to keep - recent; None where there is no such column.
    """
    column = num_kept - recent - (frozen + num_kept - recent) % page_size
    return None if column < 0 or evicted % page_size else column


def needs_order(recent: int, interval: int) -> bool:
    """Whether a later round relies on the order of what this one keeps, if nothing of it is known to be in order.

    The newest `recent` tokens are taken from the end of the row. Those that came since the last round, `interval` at
    least, are in order anyway.
    """
    return recent > interval


def remap(slots: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Orders each request's private slots: kept ones first, then evicted ones, both in row order.

    Args:
        slots: [R, N] int32 or int64, private slots of each request, right-padded with anything.
        kept: [R, num_kept] int64, ascending indices into the private tokens.

    Returns:
        [R, N] as `slots`: columns [0, keep) are the kept slots, [keep, length) the evicted ones, the rest padding.
    """
    stays = torch.zeros_like(slots, dtype=torch.bool).scatter_(1, kept, True)
    place = torch.where(stays, stays.cumsum(1), kept.shape[1] + (~stays).cumsum(1)) - 1
    return torch.empty_like(slots).scatter_(1, place, slots)


def unchanged_start(kept: torch.Tensor) -> torch.Tensor:
    """How many private tokens stay where they are before the first that some set drops.

    Args:
        kept: [R, ..., num_kept] int64, ascending indices into the private tokens.

    Returns:
        [R] int64.
    """
    # Behind the first hole every token lies behind its place, so those that do not all come before it.
    same = kept == torch.arange(kept.shape[-1], device=kept.device)
    return same.sum(-1).view(len(kept), -1).amin(1)


def moves_of(strategy: str, num_kept: int, num_tokens: int) -> int:
    """Most moves of one kept set, of a row with `num_tokens` private tokens.

    Raises ValueError on an unknown strategy.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy must be one of {STRATEGIES}, got {strategy!r}")
    return num_kept if strategy == "slide" else min(num_kept, num_tokens - num_kept)


def list_moves(
    slots: torch.Tensor,
    kept: torch.Tensor,
    strategy: str,
    *,
    cut: int | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The copies that bring each kept set to the private slots that its request keeps.

    Args:
        slots: [R, N] int32 or int64, private slots of each request in row order, right-padded.
        kept: [R, num_kept], [R, H_kv, num_kept] or [R, L, H_kv, num_kept] int64.
        strategy: "slide" or "fill".
        cut: the private column from which on `fill` empties as many slots as a request loses tokens, at most
            `num_kept`; the others stay. None for `num_kept`: the end of the row. `slide` always empties the end.
        lengths: [R] int64, private tokens of each request; N where None, which makes no difference at the end.

    Returns:
        sources, targets: [R, ..., M] slots, dims as of `kept`, M as of `moves_of`; equal slots are no move. No slot is
        the target of two moves; for "fill" no target is a source, for "slide" the source of move m is no target of a
        move before m.

    Raises ValueError on an unknown strategy.
    """
    num_kept, num_tokens = kept.shape[-1], slots.shape[1]
    most = moves_of(strategy, num_kept, num_tokens)
    place = torch.arange(num_kept, device=kept.device).expand_as(kept)
    if strategy == "slide":
        source, target = kept, place
    else:
        lengths = kept.new_full((len(kept),), num_tokens) if lengths is None else lengths
        source, target = _fill(kept, place, most, num_kept if cut is None else cut, lengths - num_kept)
    rows = slots.view(slots.shape[0], *[1] * (kept.ndim - 2), -1).expand(*kept.shape[:-1], -1)
    return rows.gather(-1, source), rows.gather(-1, target)


def _fill(
    kept: torch.Tensor, place: torch.Tensor, most: int, cut: int, emptied: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices [R, ..., M] of kept tokens in columns [cut, cut + emptied[r]) and of the holes around these that they go
    to; equal where none is left.

    Before kept token i lie kept[i] - i holes, so the hole of rank q is at q plus the number of kept tokens that have
    at most q holes before them.
    """
    rank, kept = place[..., :most].contiguous(), kept.contiguous()
    ends = torch.stack([torch.full_like(emptied, cut), cut + emptied], -1)  # [R, 2]
    ends = ends.view(len(ends), *[1] * (kept.ndim - 2), 2).expand(*kept.shape[:-1], 2).contiguous()
    first, behind = torch.searchsorted(kept, ends).split(1, -1)  # [R, ..., 1], of the kept
    which = first + rank
    # Those of the emptied columns are passed over.
    inside = ends[..., 1:] - cut - (behind - first)
    hole = torch.where(rank < cut - first, rank, rank + inside)
    target = hole + torch.searchsorted(kept - place, hole, right=True)
    source = kept.gather(-1, which.clamp_max(kept.shape[-1] - 1))
    return torch.where(which < behind, source, 0), torch.where(which < behind, target, 0)


def move_torch(buffers: Sequence[torch.Tensor], sources: torch.Tensor, targets: torch.Tensor) -> None:
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
