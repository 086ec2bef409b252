"""A random Nanbeige, whose tokens run through all layers twice. The account is a Llama that has each layer twice."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from families import HEAD_DIM, HEADS, KV_HEADS, LAYERS, config_of
from tiny_model import TinyModel

LOOPS = 2


class Looped(TinyModel):
    def load(self) -> Any:
        return super().load() if self.path.name == "account" else replace(self, path=self.path / "account").load()


def build_looped(folder: Path) -> Looped:
    """Writes the model. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(config_of("llama"))
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Norms are all equal in a new model, and would hide that they are not applied.
            if "norm" in name:
                value.add_(0.1 * torch.randn_like(value))
    layers = LAYERS // LOOPS
    for number, layer in enumerate(model.model.layers):
        layer.load_state_dict(model.model.layers[number % layers].state_dict())
    path = folder / "nanbeige"
    model.save_pretrained(path / "account")
    fields = json.loads((path / "account" / "config.json").read_text())
    del fields["rope_parameters"]
    own = {"architectures": ["NanbeigeForCausalLM"], "model_type": "nanbeige", "num_hidden_layers": layers}
    fields |= {**own, "num_loops": LOOPS, "skip_loop_final_norm": True, "rope_theta": 10000.0}
    (path / "config.json").write_text(json.dumps(fields))
    again = tuple(f"model.layers.{number}." for number in range(layers, LAYERS))
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(again)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    return Looped(path, folder / "nanbeige.safetensors", LAYERS, HEADS, KV_HEADS, HEAD_DIM)
