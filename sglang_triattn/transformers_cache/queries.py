"""Captures the queries of transformers models where they enter the attention function.

Hooks on `q_proj` would miss a q_norm (Qwen3) and fused projections; at the attention function the query is, by
construction, the one that meets the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "sdpa"
"""The `attn_implementation` that a model must be loaded with for `watching_queries`."""


@contextmanager
def watching_queries(see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """While open, calls `see(layer, query)` before every attention call of transformers models.

    Args:
        see: receives `query` as [B, H_q, S, head_dim], post-RoPE.
    """
    attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def watched(module, query, *args, **kwargs):
        see(module.layer_idx, query)
        return attend(module, query, *args, **kwargs)

    # The mapping's own override level: deleting the entry restores the original function.
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = watched
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION]
