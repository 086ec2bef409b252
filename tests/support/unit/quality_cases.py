"""Shared by the tests of the quality benchmark: a random model, and streams of random tokens."""

from __future__ import annotations

import dataclasses

import torch

from benchmarks.quality.cells import Cell
from benchmarks.quality.choices import read_choice
from benchmarks.quality.run import Runner
from benchmarks.quality.tokens import Asked, Tokens
from sglang_triattn.stats.file import QueryStats
from sglang_triattn.transformers_cache.cache import shape_of

INTERVAL = 32


def random_stats(model) -> QueryStats:
    shape = shape_of(model)
    generator = torch.Generator().manual_seed(0)
    size = (shape.num_layers, shape.num_q_heads, shape.rope.inv_freq.numel(), 2)
    mean = torch.view_as_complex(torch.randn(*size, generator=generator))
    return QueryStats(
        mean, 1.5 * mean.abs(), shape.num_kv_heads, shape.head_dim, shape.rope, shape.fingerprint, 1, "random"
    )


def words(seed: int, count: int) -> list[int]:
    return torch.randint(2, 102, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def stream_of(model, *, prompt: int = 20, private: int = 200, questions: int = 40):
    """Random tokens; every other answer is how the model itself continues."""
    stream = Tokens("random", words(1, prompt), words(2, private))
    asked = []
    for number in range(questions):
        text, answer = words(100 + number, 3 + number % 4), words(200 + number, 1 + number % 3)
        if number % 2:
            ids = torch.tensor([stream.prompt + stream.private + text])
            answer = model.generate(ids, max_new_tokens=len(answer), do_sample=False)[0, ids.shape[1] :].tolist()
        asked.append(Asked("odd" if number % 2 else "even", text, answer))
    return dataclasses.replace(stream, questions=tuple(asked))


def cells_of(names, *shares):
    return [Cell(share, read_choice(name)) for share in shares for name in names]


def runner_of(model, **changes):
    options = {"interval": INTERVAL, "progress": lambda line: None, **changes}
    return Runner(model, random_stats(model), **options)
