"""Statistics of a model that does not exist, and the shape of that model."""

import dataclasses

import torch

from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.file import ModelShape, QueryStats

LAYERS, HEADS, KV_HEADS, HEAD_DIM, FREQUENCIES = 3, 6, 2, 16, 8


def rope(theta: float = 1e4, **changes) -> Rope:
    inv_freq = theta ** (-torch.arange(FREQUENCIES, dtype=torch.float64) / FREQUENCIES)
    return dataclasses.replace(Rope(inv_freq, 1.0, 2 * FREQUENCIES, "half"), **changes)


def stats(**changes) -> QueryStats:
    generator = torch.Generator().manual_seed(0)
    mean = torch.view_as_complex(torch.randn(LAYERS, HEADS, FREQUENCIES, 2, generator=generator))
    values = QueryStats(mean, mean.abs() * 1.5, KV_HEADS, HEAD_DIM, rope(), "f" * 32, 4096, "a test")
    return dataclasses.replace(values, **changes)


def shape(**changes) -> ModelShape:
    return dataclasses.replace(ModelShape(LAYERS, HEADS, KV_HEADS, HEAD_DIM, rope(), "f" * 32), **changes)
