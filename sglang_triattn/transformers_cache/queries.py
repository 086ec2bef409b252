"""Queries of transformers models, where every model hands them to its attention function.

Hooks on `q_proj` would miss a q_norm (Qwen3) and fused projections; at the attention function the query is, by
construction, the one that meets the keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION = "sdpa"
"""How a model must be loaded (`attn_implementation`) for `watching_queries`."""


@contextmanager
def watching_queries(see: Callable[[int, torch.Tensor], None]) -> Iterator[None]:
    """While open, `see(layer, query)` is called before every attention call of transformers models runs.

    query: [B, H_q, S, head_dim], post-RoPE.
    """
    attend = ALL_ATTENTION_FUNCTIONS[ATTENTION]

    def watched(module, query, *args, **kwargs):
        see(module.layer_idx, query)
        return attend(module, query, *args, **kwargs)

    # The mapping's own override level: deleting it brings the original function back.
    ALL_ATTENTION_FUNCTIONS[ATTENTION] = watched
    try:
        yield
    finally:
        del ALL_ATTENTION_FUNCTIONS[ATTENTION]
