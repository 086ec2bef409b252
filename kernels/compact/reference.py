"""Compaction: what happens to a row once the kept tokens are known. Reference for the kernels in this folder.

Three ways to empty as many of a request's private slots as it loses tokens:

    remap   permutes the row so that the kept slots come first; moves no K/V. Needs slots that can be freed one by
            one (page size 1) and one kept set for all heads.
    slide   empties one stretch of the row and copies every other kept token's K/V to the place that keeps its order.
    fill    empties the same stretch and copies only the kept tokens in it, into the holes around it.

Attention over a set of keys does not depend on their order, and neither does a score (a key's position is in its
phase). What does depend on order is which tokens are the newest. Those stay in every head, so their slots are the same
for all heads and their K/V can be left alone: a stretch that ends before them is cut out of the row, and they move up
in the row, which is only a list of slots. The private part of a row, cut at column num_kept - recent, where both copy
least:

    before  0                      cut                     length - recent              length
            |-- older --------------|-- emptied -------------|-- newest, in order -------|
                    holes  <-- kept tokens of all heads
    after   |-- older --------------|-- newest, in order ----|      the slots between are free

Whole pages can be cut out only where the cut starts a page and the request loses a multiple of the page size; see
`cut_column`. The cut may lie before num_kept - recent; the stretch that starts there is then emptied, with holes on
both sides of it. Where no cut is possible, K/V is taken from the end of the row, where the newest tokens are, and
`fill` loses their order, too; see `needs_order`.

Kept sets are [R, num_kept] (one set for all heads), [R, H_kv, num_kept] or [R, L, H_kv, num_kept], ascending.
Symbols: R requests, L layers, H_kv KV heads, N private tokens of the longest request, M moves of one kept set.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

STRATEGIES = ("slide", "fill")


def cut_column(num_kept: int, recent: int, frozen: int, evicted: int, page_size: int) -> int | None:
    """The last private column at which whole pages can be cut out of a row without copying its newest tokens.

    Args:
        num_kept: private tokens that stay, including the newest `recent`.
        frozen: first private position of the row.
        evicted: private tokens that are evicted.

    Returns:
        A column from 0 to num_kept - recent, or None if there is none.
    """
    column = num_kept - recent - (frozen + num_kept - recent) % page_size
    return None if column < 0 or evicted % page_size else column


def needs_order(recent: int, interval: int) -> bool:
    """Whether a later round relies on the order of what this one keeps, assuming that this one preserves none.

    The newest `recent` tokens are taken from the end of the row. Those appended since the last round, at least
    `interval`, are in order anyway.
    """
    return recent > interval


def remap(slots: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Orders each request's private slots: kept ones first, then evicted ones, both in row order.

    Args:
        slots: [R, N] int32 or int64, private slots of each request, right-padded with anything.
        kept: [R, num_kept] int32 or int64, ascending indices into the private tokens.

    Returns:
        [R, N] like `slots`: columns [0, num_kept) are the kept slots, [num_kept, length) the evicted ones, the rest
        padding.
    """
    stays = torch.zeros_like(slots, dtype=torch.bool).scatter_(1, kept.long(), True)
    place = torch.where(stays, stays.cumsum(1), kept.shape[1] + (~stays).cumsum(1)) - 1
    return torch.empty_like(slots).scatter_(1, place, slots)


def unchanged_start(kept: torch.Tensor) -> torch.Tensor:
    """Number of private tokens before the first one that any kept set drops; they stay where they are.

    Args:
        kept: [R, ..., num_kept] int64, ascending indices into the private tokens.

    Returns:
        [R] int64.
    """
    # Past the first hole every kept token is beyond its place, so the tokens that are in place all come before it.
    same = kept == torch.arange(kept.shape[-1], device=kept.device)
    return same.sum(-1).view(len(kept), -1).amin(1)


def moves_of(strategy: str, num_kept: int, num_tokens: int) -> int:
    """Most moves of one kept set in a row with `num_tokens` private tokens.

    Raises:
        ValueError: the strategy is unknown.
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
    """Lists the copies that bring each kept set into the private slots that its request keeps.

    Args:
        slots: [R, N] int32 or int64, private slots of each request in row order, right-padded.
        kept: [R, num_kept], [R, H_kv, num_kept] or [R, L, H_kv, num_kept] int64.
        strategy: "slide" or "fill".
        cut: first private column of the stretch that is emptied, at most `num_kept`; the stretch is as long as the
            number of tokens that the request loses. None means `num_kept`: the end of the row.
        lengths: [R] int64, private tokens of each request. None means N, which makes no difference where the end is
            emptied.

    Returns:
        sources, targets: [R, ..., M] slots, with the leading dims of `kept` and M from `moves_of`; where the two are
        equal, nothing moves. No slot is the target of two moves. For "fill" no target is a source; for "slide" the
        source of move m is not the target of any move before m.

    Raises:
        ValueError: the strategy is unknown.
    """
    num_kept, num_tokens = kept.shape[-1], slots.shape[1]
    most = moves_of(strategy, num_kept, num_tokens)
    place = torch.arange(num_kept, device=kept.device).expand_as(kept)
    lengths = kept.new_full((len(kept),), num_tokens) if lengths is None else lengths
    find = _slide if strategy == "slide" else _fill
    source, target = find(kept, place, most, num_kept if cut is None else cut, lengths - num_kept)
    rows = slots.view(slots.shape[0], *[1] * (kept.ndim - 2), -1).expand(*kept.shape[:-1], -1)
    return rows.gather(-1, source), rows.gather(-1, target)


def _slide(
    kept: torch.Tensor, place: torch.Tensor, most: int, cut: int, emptied: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets [R, ..., M] as indices into the private tokens.

    The first `cut` kept tokens go to the left, from the first one on. The others go to the right, from the last one on,
    to columns after the emptied ones; no token crosses these.
    """
    rank = torch.where(place < cut, place, cut + most - 1 - place)
    emptied = emptied.view(len(emptied), *[1] * (kept.ndim - 1))
    return kept.gather(-1, rank), rank + emptied * (rank >= cut)


def _fill(
    kept: torch.Tensor, place: torch.Tensor, most: int, cut: int, emptied: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sources and targets [R, ..., M] as indices into the private tokens, equal where no move is left.

    Sources are the kept tokens in columns [cut, cut + emptied[r]), targets the holes outside them. Before kept token i
    there are kept[i] - i holes, so the hole of rank q is at q plus the number of kept tokens with at most q holes
    before them.
    """
    rank, kept = place[..., :most].contiguous(), kept.contiguous()
    ends = torch.stack([torch.full_like(emptied, cut), cut + emptied], -1)  # [R, 2]
    ends = ends.view(len(ends), *[1] * (kept.ndim - 2), 2).expand(*kept.shape[:-1], 2).contiguous()
    first, end = torch.searchsorted(kept, ends).split(1, -1)  # [R, ..., 1], indices into kept
    which = first + rank
    # The holes in the emptied columns are skipped.
    inside = ends[..., 1:] - cut - (end - first)
    hole = torch.where(rank < cut - first, rank, rank + inside)
    target = hole + torch.searchsorted(kept - place, hole, right=True)
    source = kept.gather(-1, which.clamp_max(kept.shape[-1] - 1))
    return torch.where(which < end, source, 0), torch.where(which < end, target, 0)


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
