"""Statistics of a model that does not exist, and the shape of that model."""

import dataclasses

import torch

from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.file import ModelShape, QueryStats

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FREQUENCIES = 3, 6, 2, 16, 8


def rope(theta: float = 1e4, **changes) -> Rope:
    inv_freq = theta ** (-torch.arange(FREQUENCIES, dtype=torch.float64) / FREQUENCIES)
    return dataclasses.replace(Rope(inv_freq, 1.0, 2 * FREQUENCIES, "half"), **changes)


PARTIAL = 4
"""Frequencies of the partial rotary model."""


def partial_rope() -> Rope:
    """Turns half of each head."""
    return rope(inv_freq=rope().inv_freq[:PARTIAL], rotary_dim=2 * PARTIAL)


def partial_stats(**changes) -> QueryStats:
    """Statistics with means of the dims that are not turned, and a layer without RoPE."""
    whole = stats()
    values = stats(
        mean=whole.mean[..., :PARTIAL],
        abs_mean=whole.abs_mean[..., :PARTIAL],
        rope=partial_rope(),
        layers=(0, 2, 5),
        rotates=(True, False, True),
        unrotated_mean=torch.randn(LAYERS, HEADS, HEAD_DIM - 2 * PARTIAL, generator=torch.Generator().manual_seed(1)),
    )
    return dataclasses.replace(values, **changes)


def partial_shape(**changes) -> ModelShape:
    served = shape(rope=partial_rope(), layers=(0, 2, 5), rotates=(True, False, True))
    return dataclasses.replace(served, **changes)


def stats(**changes) -> QueryStats:
    generator = torch.Generator().manual_seed(0)
    mean = torch.view_as_complex(torch.randn(LAYERS, HEADS, FREQUENCIES, 2, generator=generator))
    values = QueryStats(mean, mean.abs() * 1.5, KV_HEADS, HEAD_DIM, rope(), "f" * 32, 4096, "a test")
    return dataclasses.replace(values, **changes)


def shape(**changes) -> ModelShape:
    return dataclasses.replace(ModelShape(tuple(range(LAYERS)), HEADS, KV_HEADS, HEAD_DIM, rope(), "f" * 32), **changes)
