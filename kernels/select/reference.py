"""Selection: which private tokens of a request survive a round (arXiv 2604.04921, section 4; docs/method.md).

    0                          length - recent      length            N
    |-------- candidates ------------|--- newest -----|--- padding ----|
      ranked by importance             always kept      never looked at

Rows of scores (one per layer and query head) have different scales, so each is standardised over the
request's own candidates before rows are compared. Importance then merges the rows; `selection` names how, and
thereby how many kept sets there are:

    union            one set                 max over all layers and query heads (the paper's)
    shared-mean      one set                 mean over all layers and query heads
    per-head         one per KV head         mean over layers of the max over the head's group
    per-layer-head   one per layer, KV head  max over the head's group

With "per-layer-head" a share of the places can go to the candidates with the largest values (`value_size`) before the
rest are chosen by importance: the two criteria do not compete, each has its own places.
"""

from collections.abc import Callable
from typing import cast

import torch

from sglang_triattn.kernels.score.value_size import value_count
from sglang_triattn.kernels.select import selection_named

MIN_STD = 1e-6
"""Smallest standard deviation to divide by: a row without contrast says nothing instead of dividing by zero."""


def select_torch(
    scores: torch.Tensor | None,
    lengths: torch.Tensor,
    num_kept: int,
    recent: int,
    *,
    selection: str = "union",
    num_kv_heads: int | None = None,
    reduce_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    sizes: torch.Tensor | None = None,
    value_share: float = 0.0,
) -> torch.Tensor:
    """Indices of the private tokens that stay.

    Args:
        scores: [R, L, H_q, N], from `score_torch`; columns from `lengths[r]` on are padding, maybe NaN. None if
            `value_share` is 1, when they decide nothing.
        lengths: [R] int64, private tokens of each request, each at least `num_kept`.
        num_kept: tokens that stay, including the newest `recent`. Among equals the oldest stays.
        num_kv_heads: needed by "per-head" and "per-layer-head".
        reduce_ranks: see `Scorer`; for selections with one kept set.
        sizes: [R, L, H_kv, N], from `value_size_torch`, padded like `scores`; needed by `value_share`.
        value_share: share, from 0 to 1, of the kept tokens other than the newest that are chosen for the largest
            values; the rest are the best of the other candidates. For "per-layer-head".

    Returns:
        int64 [R, num_kept], ascending; for "per-head" [R, H_kv, num_kept], for "per-layer-head"
        [R, L, H_kv, num_kept].

    Raises:
        ValueError: the selection is unknown, `num_kv_heads` is missing, `value_share` is given with a selection other
            than "per-layer-head", or unless 0 <= recent <= num_kept <= N.
    """
    if value_share and (not selection_named(selection).per_layer or sizes is None):
        raise ValueError(f"value_share needs sizes and the selection per-layer-head, got {selection!r}")
    num_tokens = cast(torch.Tensor, sizes if scores is None else scores).shape[-1]
    if not 0 <= recent <= num_kept <= num_tokens:
        raise ValueError(f"need 0 <= recent <= num_kept <= {num_tokens}, got recent {recent}, num_kept {num_kept}")
    large = value_count(num_kept, recent, value_share)
    if value_share and sizes is not None:
        outside = ~_candidates(num_tokens, lengths, recent)[:, None, None]
        sizes = sizes.masked_fill(outside, float("-inf"))
        if large == num_kept - recent:
            return keep_torch(sizes, lengths, num_kept, recent)
    importance = importance_torch(
        cast(torch.Tensor, scores), lengths, recent, selection=selection, num_kv_heads=num_kv_heads
    )
    if reduce_ranks is not None:
        importance = reduce_ranks(importance[:, None])[:, 0]
    if large > 0 and sizes is not None:
        importance.scatter_(-1, keep_torch(sizes, lengths, large, 0), float("inf"))
    return keep_torch(importance, lengths, num_kept, recent)


def importance_torch(
    scores: torch.Tensor,
    lengths: torch.Tensor,
    recent: int,
    *,
    selection: str = "union",
    num_kv_heads: int | None = None,
) -> torch.Tensor:
    """Importance of each candidate, -inf in all other columns.

    Takes the arguments of `select_torch`. z-scores use the population standard deviation over the candidates.

    Returns:
        float32 [R, N]; [R, H_kv, N] for "per-head", [R, L, H_kv, N] for "per-layer-head".
    """
    chosen, kv_heads = selection_named(selection), num_kv_heads or 1
    if not chosen.shared and num_kv_heads is None:
        raise ValueError(f"selection {selection!r} needs num_kv_heads")
    candidates = _candidates(scores.shape[-1], lengths, recent)  # [R, N]
    z = _standardise(scores.float(), candidates[:, None, None, :], lengths - recent)
    if chosen.merge == "max":
        merged = z.amax((1, 2))
    elif chosen.merge == "mean":
        merged = z.mean((1, 2))
    else:
        merged = z.unflatten(2, (kv_heads, -1)).amax(3)  # [R, L, H_kv, N]
        merged = merged if chosen.per_layer else merged.mean(1)
    outside = ~candidates.view(candidates.shape[0], *[1] * (merged.ndim - 2), -1)
    return merged.masked_fill_(outside, float("-inf"))


def keep_torch(importance: torch.Tensor, lengths: torch.Tensor, num_kept: int, recent: int) -> torch.Tensor:
    """The `num_kept - recent` most important candidates and the newest `recent` tokens.

    Args:
        importance: [R, ..., N], -inf outside the candidates.

    Returns:
        [R, ..., num_kept] int64, ascending.
    """
    # A stable sort, not topk: ties must fall the same way on every device and rank, lowest index first.
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    newest = lengths[:, None] - recent + torch.arange(recent, device=lengths.device)  # [R, recent]
    newest = newest.view(lengths.shape[0], *[1] * (importance.ndim - 2), recent)
    newest = newest.expand(*importance.shape[:-1], recent)
    return torch.cat([order[..., : num_kept - recent], newest], dim=-1).sort(dim=-1).values


def _candidates(num_tokens: int, lengths: torch.Tensor, recent: int) -> torch.Tensor:
    """[R, N] bool: the columns that compete for a place."""
    return torch.arange(num_tokens, device=lengths.device) < (lengths - recent)[:, None]


def _standardise(scores: torch.Tensor, mask: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """z-scores over the masked columns, 0 elsewhere; sums in float64 so that padding cannot shift a rank."""
    counts = counts.clamp_min(1).to(torch.float64)[:, None, None, None]
    # where, not multiplication: 0 * NaN is NaN.
    zero = scores.new_zeros(())
    mean = torch.where(mask, scores, zero).sum(-1, keepdim=True, dtype=torch.float64) / counts
    centred = torch.where(mask, scores - mean.float(), zero)
    variance = centred.square().sum(-1, keepdim=True, dtype=torch.float64) / counts
    return centred.div_(variance.sqrt().clamp_min(MIN_STD).float())
