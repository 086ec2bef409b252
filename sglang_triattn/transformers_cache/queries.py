"""Captures the queries of transformers models where they enter the attention function.

Hooks on `q_proj` would miss a q_norm (Qwen3) and fused projections; at the attention function the query is, by
construction, the one that meets the keys.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "sdpa"
"""The `attn_implementation` that most models are loaded with for `watching_queries`."""

_SINKS = ("gpt_oss", "mimo_v2_flash")


def attention_for(config: Any) -> str:
    """The `attn_implementation` that a model must be loaded with for `watching_queries`.

    That of most models leaves out bounds of the scores and attention sinks.

    Args:
        config: a transformers configuration of a text model.
    """
    capped = getattr(config, "attn_logit_softcapping", None)
    return "eager" if capped or config.model_type in _SINKS else ATTENTION


@contextmanager
def watching_queries(see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """While open, calls `see(layer, query)` before every attention call of transformers models.

    Args:
        see: receives `query` as [B, H_q, S, head_dim], post-RoPE.
    """
    with watching_attention(lambda layer, query, key, value, scaling: see(layer, query)):
        yield


@contextmanager
def watching_attention(
    see: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float | None], None],
) -> Iterator[None]:
    """While open, calls `see(layer, query, key, value, scaling)` before every attention call of transformers models.

    Args:
        see: receives `query` as above, `key` and `value` as [B, H_kv, T, dim] with what a cache holds, and what logits
            are multiplied by, if not by head_dim ** -0.5.
    """
    attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def watched(module, query, key, value, *args, **kwargs):
        see(module.layer_idx, query, key, value, kwargs.get("scaling"))
        return attend(module, query, key, value, *args, **kwargs)

    def watched_eager(module, query, key, value, *args, **kwargs):
        see(module.layer_idx, query, key, value, kwargs.get("scaling"))
        # Each model has its own.
        own = sys.modules[type(module).__module__].eager_attention_forward
        return own(module, query, key, value, *args, **kwargs)

    # The mapping's own override level: deleting the entries restores the original functions.
    ALL_ATTENTION_FUNCTIONS[ATTENTION], ALL_ATTENTION_FUNCTIONS["eager"] = watched, watched_eager
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION], ALL_ATTENTION_FUNCTIONS["eager"]
