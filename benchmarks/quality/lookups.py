"""Weights that predict from a cached key how strongly a later token may look it up.

How strongly a text's tokens are looked up at most is measured as KVzip does (arXiv 2505.23416): the model reads the
text, is asked to repeat it, and reads it again. With a the attention of the second reading to the first,

    s = max over the queries of the second reading, and over the query heads that share the key, of a

KVzap (arXiv 2601.07891) predicts such values from hidden states. Here a ridge regression for each layer and KV head
predicts them from what RoPE does not turn, the absolute values of the key's complex components k_f:

    log(s + EPSILON) ~ sum_f w_f |k_f| + constant

So a key in a KV pool is enough, wherever its token stands in a text. `fit_lookups.py` is the command.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sglang_triattn.model.rope import Rope, to_complex
from sglang_triattn.transformers_cache.feed import CHUNK, compute_dense
from sglang_triattn.transformers_cache.queries import watching_queries

REQUEST = "\n\nRepeat the previous text exactly:\n"
EPSILON = 1e-3
"""Attention that hardly differs from none."""
RIDGE = 0.03
"""Penalty on weights of standardised sizes, relative to their variance."""
# The first tokens of a text are attended to wherever there is nothing to look up.
_SINKS = 8
_WEIGHTS = "weights"


class LookupsError(ValueError):
    """Weights cannot be made or used; the message is one sentence for the user."""


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


def sizes(keys: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Absolute values [..., F] float32 of the complex components of keys [..., head_dim]; RoPE does not change them."""
    return to_complex(keys.float(), rope).abs()


@torch.no_grad()
def read_again(
    model: Any, tokenizer: Any, ids: Sequence[int], *, chunk: int = CHUNK
) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys of a text, and how strongly each is looked up as the model reads the text again.

    Args:
        model: as `load_model` returns it.
        ids: the text.
        chunk: tokens of one forward pass.

    Returns:
        keys [L, H_kv, n, head_dim] float32, after RoPE, and s [L, H_kv, n] float32.
    """
    dense = compute_dense(model, ids, chunk=chunk)
    keys = [keys_of(dense, layer) for layer in range(len(dense.layers))]
    most = [key.new_zeros(key.shape[:2]) for key in keys]
    again = tokenizer(REQUEST, add_special_tokens=False)["input_ids"] + list(ids)

    def see(layer: int, query: torch.Tensor) -> None:
        found = attention_to(query[0].float(), keys_of(dense, layer), len(ids)).amax(1)
        most[layer] = torch.maximum(most[layer], found)

    with watching_queries(see):
        compute_dense(model, again, chunk=chunk, dense=dense)
    return torch.stack(keys), torch.stack(most)


def keys_of(dense: DynamicCache, layer: int) -> torch.Tensor:
    """[H_kv, T, head_dim] float32."""
    return cast(torch.Tensor, cast("list[DynamicLayer]", dense.layers)[layer].keys)[0].float()


def attention_to(queries: torch.Tensor, keys: torch.Tensor, count: int) -> torch.Tensor:
    """[H_kv, S, count] float32: what the newest queries [H_q, S, d] give the first keys of [H_kv, T, d].

    Of the query heads that share a key, the one that gives it most counts.
    """
    size, total = queries.shape[1], keys.shape[1]
    grouped = queries.unflatten(0, (keys.shape[0], -1))
    logits = torch.einsum("hgsd,htd->hgst", grouped, keys) * keys.shape[-1] ** -0.5
    seen = torch.ones(size, total, dtype=torch.bool, device=keys.device).tril(total - size)
    return logits.masked_fill_(~seen, float("-inf")).softmax(-1)[..., :count].amax(1)


def fitted(measured: Sequence[tuple[torch.Tensor, torch.Tensor]], rope: Rope) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights w [L, H_kv, F], and the share of the variance of log(s) that they explain, [L, H_kv].

    Args:
        measured: of each text, what `read_again` returns.
    """
    x = torch.cat([sizes(keys[:, :, _SINKS:], rope) for keys, _ in measured], dim=2)
    y = torch.cat([torch.log(most[:, :, _SINKS:] + EPSILON) for _, most in measured], dim=2)
    spread = x.std(2, keepdim=True).clamp_min(1e-4)
    x = (x - x.mean(2, keepdim=True)) / spread
    y = (y - y.mean(2, keepdim=True))[..., None]
    products = x.transpose(-1, -2) @ x / x.shape[2] + RIDGE * torch.eye(x.shape[-1], device=x.device)
    weights = torch.linalg.solve(products, x.transpose(-1, -2) @ y / x.shape[2])
    explained = 1 - (x @ weights - y).square().mean((2, 3)) / y.square().mean((2, 3))
    return weights[..., 0] / spread[:, :, 0], explained


def save_lookups(path: str, weights: torch.Tensor) -> None:
    """Writes weights [L, H_kv, F]. Raises OSError if the file cannot be written."""
    try:
        save_file({_WEIGHTS: weights.cpu().contiguous()}, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def load_lookups(path: str, layers: int, kv_heads: int) -> torch.Tensor:
    """The weights [L, H_kv, F] of a file.

    Raises:
        LookupsError: the file is missing, of another kind, or of another model.
    """
    try:
        weights = load_file(path)[_WEIGHTS]
    except (OSError, SafetensorError, KeyError) as error:
        raise LookupsError(
            f"{path} holds no weights: make it by `python -m benchmarks.quality.fit_lookups`."
        ) from error
    if weights.shape[:2] != (layers, kv_heads):
        raise LookupsError(
            f"The weights of {path} are of {weights.shape[0]} layers and {weights.shape[1]} KV heads, but the model "
            f"has {layers} and {kv_heads}: make them of this model."
        )
    return weights
