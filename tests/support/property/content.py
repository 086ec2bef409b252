"""The content oracle: K and V that say whose they are, so that whoever reads them back knows what moved where."""

from __future__ import annotations

from functools import lru_cache

import torch

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 2, 2, 4, 8


def exact_length(positions: torch.Tensor) -> int:
    """Entries of a row before the first hole in any layer or head."""
    there = (positions == torch.arange(positions.shape[-1])).all(0).all(0)
    return int(there.long().cumprod(0).sum())


def same_for_all(positions) -> torch.Tensor:
    """[LAYERS, KV_HEADS, n] int64 from n positions that all heads share."""
    return torch.tensor(list(positions), dtype=torch.int64).expand(LAYERS, KV_HEADS, -1)


def contents(tokens: list[int], positions: torch.Tensor, stamps: torch.Tensor | int) -> torch.Tensor:
    """[n, LAYERS, 2, KV_HEADS, HEAD_DIM]: K and V that name their token, position, stamp, layer, K or V, and head.

    Args:
        positions: [LAYERS, KV_HEADS, n].
        stamps: one for all, or shaped like `positions`.
    """
    return _contents(torch.tensor(tokens)[positions], positions, torch.as_tensor(stamps).expand_as(positions))


@lru_cache(maxsize=1 << 16)
def content_of_one(token: int, position: int, stamp: int) -> torch.Tensor:
    """[LAYERS, 2, KV_HEADS, HEAD_DIM]: what `contents` has for one token, at a position that all heads share."""
    return _contents(*(torch.full((LAYERS, KV_HEADS, 1), named) for named in (token, position, stamp)))[0]


def _contents(token: torch.Tensor, positions: torch.Tensor, stamps: torch.Tensor) -> torch.Tensor:
    seed = torch.arange(LAYERS * 2 * KV_HEADS, dtype=torch.float32).reshape(LAYERS, 2, KV_HEADS, 1, 1)
    place = (torch.arange(HEAD_DIM) * (positions[..., None] + 1) * 0.37 + token[..., None])[:, None]
    content = torch.sin(seed * 7 + place)  # [LAYERS, 2, KV_HEADS, n, HEAD_DIM]
    for column, named in enumerate((token, positions, stamps)):
        content[..., column] = named[:, None]
    return content.permute(3, 0, 1, 2, 4)
