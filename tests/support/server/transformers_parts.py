"""What accounts need of `transformers`: a cache that rounds as a server's does, and the attention of a layer."""

from __future__ import annotations

import torch
from transformers import DynamicCache, PreTrainedConfig


class RoundedCache(DynamicCache):
    """Holds what a KV cache of another dtype would return."""

    def __init__(self, dtype: torch.dtype, config: PreTrainedConfig | None = None) -> None:
        super().__init__(config=config)
        self._dtype = dtype

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *rest, **options):
        key_states, value_states = (x.to(self._dtype).to(x.dtype) for x in (key_states, value_states))
        return super().update(key_states, value_states, *rest, **options)


def attention_of(layer: torch.nn.Module) -> torch.nn.Module | None:
    """The attention of a layer of a transformers model, if it has one; in Nemotron-H, a layer has one part alone."""
    found = getattr(layer, "self_attn", getattr(layer, "attn", None))
    if hasattr(found, "forget_gate"):
        # In Kimi-Linear, that of a layer that keeps a state has the same name.
        return None
    mixer = getattr(layer, "mixer", None)
    return mixer if found is None and hasattr(mixer, "q_proj") else found


def full_frequencies(language_model: torch.nn.Module) -> torch.Tensor:
    """[F] float64: by how much RoPE turns a pair of dims per position, in layers that attend to all tokens."""
    rotary = getattr(language_model, "rotary_emb", None) or language_model.pos_emb
    frequencies = getattr(rotary, "full_attention_inv_freq", None)
    return (rotary.inv_freq if frequencies is None else frequencies).double()
