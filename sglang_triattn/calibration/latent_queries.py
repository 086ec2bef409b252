"""Queries of models with latent KV (multi-head latent attention, MLA), as they meet the cached latents.

A head's key concatenates W_uk c and one rotated key, where c is the latent that all heads share. So its logit is

    q_nope^T W_uk c + q_pe^T k_pe = (W_uk^T q_nope)^T c + q_pe^T k_pe

and what meets the latent is the absorbed query W_uk^T q_nope. It is linear in the query: the mean absorbed query is the
absorbed mean query, so one product per layer is enough, at the end.
"""

from __future__ import annotations

from collections.abc import Callable

import torch


@torch.no_grad()
def key_weights(
    expand: Callable[[torch.Tensor], torch.Tensor], rank: int, heads: int, key_dim: int, *, like: torch.Tensor
) -> torch.Tensor:
    """[H, key_dim, rank] float64: W_uk of each head.

    It is read by expanding the unit latents, which works for quantised weights in any layout.

    Args:
        expand: the model's projection of latents [n, rank] to [n, H * (key_dim + value_dim)], key before value.
        like: a tensor of the dtype and device that the projection takes.
    """
    units = torch.eye(rank, dtype=like.dtype, device=like.device)
    return expand(units).double().unflatten(-1, (heads, -1))[..., :key_dim].permute(1, 2, 0)


def absorbed(query: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[H, rank] float64: W_uk^T q of a query of each head, or of a sum of them, [H, key_dim] float64."""
    return torch.einsum("hd,hdr->hr", query, weights)
