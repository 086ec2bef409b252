"""Queries and keys that are normalised after their rotation, with a weight for each dim (Hunyuan v1).

SGLang parts: `HunYuanAttention` (sglang/srt/models/hunyuan.py), which hands over each head of a token as a row of its
own, and `RadixAttention` (sglang/srt/layers/radix_attention.py), which in a prefill drops the rows that are more than
the batch's tokens, as padding. So SGLang 0.5.23 by itself ends in the first prefill of such a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.model.families import family_of
from sglang_triattn.patches.hooks.hook import Hook

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_triattn.patches.model.layers import AttentionLayer
    from sglang_triattn.patches.model.rotation import Queries


def hooks() -> list[Hook]:
    """Hooks for a process that runs models."""
    return [
        Hook(
            "sglang.srt.model_executor.model_runner.ModelRunner.load_model",
            "after",
            _on_loaded,
            "self",
            why="joins the heads of queries that a norm after the rotation has split",
        )
    ]


def _on_loaded(_: object, runner: ModelRunner) -> None:
    norm = family_of(runner.model_config.hf_config.architectures).norm_after_rope
    for _, attention in _normalised(runner.model, norm):
        attention.register_forward_pre_hook(_join_heads)


def _join_heads(attention: RadixAttention, args: tuple) -> tuple:
    query, *others = args
    return query.reshape(-1, attention.tp_q_head_num * attention.qk_head_dim), *others


def without_weights(
    seen: Sequence[Queries | None], layers: Sequence[AttentionLayer], model: torch.nn.Module, norm: str
) -> list[Queries | None]:
    """`seen` of `match_rotation` before the weights of `norm`: what is left commutes with a rotation.

    Args:
        norm: `Family.norm_after_rope` of `model`; attentions without that module stay as they are.
    """
    weights = {id(attention): each.weight.double().cpu() for each, attention in _normalised(model, norm)}
    return [
        (pair[0] / weight, pair[1] / weight)
        if pair is not None and (weight := weights.get(id(layer.attention))) is not None
        else pair
        for pair, layer in zip(seen, layers, strict=True)
    ]


def _normalised(model: torch.nn.Module, norm: str) -> Iterator[tuple[Any, RadixAttention]]:
    """The attentions whose queries pass through a module of the name `norm`, each after that module."""
    from sglang.srt.layers.radix_attention import RadixAttention

    for module in model.modules():
        children = dict(module.named_children())
        if norm in children:
            yield from ((children[norm], each) for each in children.values() if isinstance(each, RadixAttention))
