"""What later queries attend to, for a choice that knows them: the ceiling of every other choice at the same budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.quality.lookups import LookedUp, attention_to, keys_of
from benchmarks.quality.tokens import Asked
from sglang_triattn.transformers_cache.feed import CHUNK, compute_dense
from sglang_triattn.transformers_cache.queries import watching_queries

BLOCK = 16
"""Tokens whose queries count together; divides CHUNK."""


@torch.no_grad()
def by_text(model: Any, ids: Sequence[int], tokens: int) -> LookedUp:
    """How strongly the later tokens of a text look up its earlier ones.

    Args:
        model: as `load_model` returns it.
        ids: the text; the model reads it with everything in sight.
        tokens: what a row may hold in the end, at least as many; nothing looks up those after the text.
    """
    dense, most = DynamicCache(), {}

    def see(layer: int, query: torch.Tensor) -> None:
        keys = keys_of(dense, layer)
        end, size = keys.shape[1], query.shape[2]
        found = attention_to(query[0].float(), keys, end).split(BLOCK, dim=1)
        for number, part in enumerate(found, (end - size) // BLOCK):
            most[number, layer] = torch.nn.functional.pad(part.amax(1), (0, tokens - end))

    with watching_queries(see):
        compute_dense(model, ids, chunk=CHUNK, dense=dense)
    blocks, layers = -(-len(ids) // BLOCK), len(dense.layers)
    table = torch.stack([torch.stack([most[number, layer] for layer in range(layers)]) for number in range(blocks)])
    return LookedUp(table.flip(0).cummax(0).values.flip(0), BLOCK)


@torch.no_grad()
def by_questions(model: Any, dense: DynamicCache, questions: Sequence[Asked]) -> LookedUp:
    """How strongly questions and their answers look up the text before them.

    Args:
        dense: K and V of the text; the questions are appended one by one, and dropped again.
    """
    length = dense.get_seq_length()
    most = [torch.zeros_like(keys_of(dense, layer)[..., 0]) for layer in range(len(dense.layers))]

    def see(layer: int, query: torch.Tensor) -> None:
        found = attention_to(query[0].float(), keys_of(dense, layer), length).amax(1)
        most[layer] = torch.maximum(most[layer], found)

    with watching_queries(see):
        for one in questions:
            compute_dense(model, one.text + one.answer[:-1], dense=dense)
            dense.crop(length)
    return LookedUp(torch.stack(most)[None])
