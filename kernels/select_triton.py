"""Selection on a CUDA device: `importance_triton`, then `keep_triton`; twin: `select.select_naive`."""

from __future__ import annotations

import torch

from sglang_triattn.kernels.importance_triton import importance_triton
from sglang_triattn.kernels.keep_triton import keep_triton


def select_triton(
    scores: torch.Tensor,
    moments: torch.Tensor,
    lengths: torch.Tensor,
    keep: int,
    recent: int,
    *,
    selection: str,
    num_kv_heads: int,
    scales: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Indices of the private tokens that stay.

    Args:
        scores, moments: from `score_triton`, with the same `recent`.
        lengths: [R] int64, private tokens of each request, each at least `keep`.
        keep: tokens that stay, the newest `recent` among them. Among equals the oldest stays.
        scales, importance: scratch, see `importance_triton`.

    Returns:
        int64 [R, keep], ascending; for "per-head" [R, H_kv, keep], for "per-layer-head" [R, L, H_kv, keep].

    Raises ValueError on an unknown selection, or unless 0 <= recent <= keep <= N.
    """
    importance = importance_triton(
        scores, moments, lengths, recent,
        selection=selection, num_kv_heads=num_kv_heads, scales=scales, importance=importance,
    )  # fmt: skip
    kept = keep_triton(importance, lengths, keep, recent)
    if selection == "per-layer-head":
        return kept.unflatten(1, (scores.shape[1], num_kv_heads))
    return kept if selection == "per-head" else kept[:, 0]
