"""How strongly tokens are looked up later, for choices that know it: ceilings of what a prediction can do.

`oracle` knows what later queries attend to, the ceiling of every other choice at the same budget; `read-again` knows
what `sglang_triattn.calibration.lookups` has weights predict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from benchmarks.quality.tokens import Asked
from sglang_triattn.calibration.lookups import REQUEST, attention_to, read_again
from sglang_triattn.transformers_cache.cache import shape_of
from sglang_triattn.transformers_cache.feed import CHUNK, compute_dense
from sglang_triattn.transformers_cache.queries import watching_queries

BLOCK = 16
"""Tokens whose queries count together; divides CHUNK."""


@dataclass(frozen=True)
class LookedUp:
    """How strongly each token of a row is looked up at most.

    Attributes:
        most: [blocks, L, H_kv, tokens] float32, by the queries of a block of tokens and of all later ones.
        block: tokens of a block; None if there is one, of queries that come after the whole row.
    """

    most: torch.Tensor
    block: int | None = None

    def after(self, position: int) -> torch.Tensor:
        """[L, H_kv, tokens], by queries from the block of `position` on."""
        return self.most[0 if self.block is None else min(position // self.block, len(self.most) - 1)]


@torch.no_grad()
def by_second_reading(model: Any, tokenizer: Any, ids: Sequence[int]) -> LookedUp:
    """How strongly a text is looked up as the model reads it again, in all layers; arguments as for `by_text`."""
    request = tokenizer(REQUEST, add_special_tokens=False)["input_ids"]
    places = {layer: layer for layer in range(shape_of(model).num_layers)}
    return LookedUp(read_again(model.base_model, request, ids, places).most[None])


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
        found = attention_to(_scaled(query), keys, end).split(BLOCK, dim=1)
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
        found = attention_to(_scaled(query), keys_of(dense, layer), length).amax(1)
        most[layer] = torch.maximum(most[layer], found)

    with watching_queries(see):
        for one in questions:
            compute_dense(model, one.text + one.answer[:-1], dense=dense)
            dense.crop(length)
    return LookedUp(torch.stack(most)[None])


def keys_of(dense: DynamicCache, layer: int) -> torch.Tensor:
    """[H_kv, T, head_dim] float32."""
    return cast(torch.Tensor, cast("list[DynamicLayer]", dense.layers)[layer].keys)[0].float()


def _scaled(query: torch.Tensor) -> torch.Tensor:
    return query[0].float() * query.shape[-1] ** -0.5
