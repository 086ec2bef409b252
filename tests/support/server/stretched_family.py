"""A random Llama with dynamic RoPE, which SGLang stretches when it loads the model, and transformers in long texts."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from families import COMMON, FAMILIES, Family, build_family
from tiny_model import TinyModel

FACTOR = 2.0
FAMILIES["dynamic-rope"] = Family(
    "LlamaConfig", "llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": FACTOR}}
)


class Stretched(TinyModel):
    def load(self) -> Any:
        model = super().load()
        rotary, longest = model.model.rotary_emb, int(FACTOR * COMMON["max_position_embeddings"])
        rotary.inv_freq, _ = ROPE_INIT_FUNCTIONS["dynamic"](model.config, seq_len=longest)
        # It shall stay as it is.
        rotary.rope_type = "default"
        return model


def build_stretched(folder: Path) -> Stretched:
    """Writes the model. Nothing has written its statistics yet."""
    tiny = build_family(folder, "dynamic-rope")
    return Stretched(**{field.name: getattr(tiny, field.name) for field in fields(tiny)})
