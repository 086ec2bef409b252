"""Draft models that read the target's hidden states: EAGLE's, EAGLE-3's, and the layer for several tokens of GLM-4.5.

Each is one decoder layer with another way in: the embedding of a token, mixed with the hidden state from which the
target predicted it. Here each passes the embedding on and adds what it attends to, so that on a text of the repeating
model's circle some drafts hold and some do not, and which ones depends on every token that the layer attends to.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding

from families import COMMON, PLAIN_ROPE
from repeating_model import FIRST, LENGTH
from tiny_model import TinyModel

AUXILIARY = (0, 1)
"""Layers whose outputs EAGLE-3's draft model reads."""


class EagleHead(nn.Module):
    """EAGLE's draft model, or EAGLE-3's.

    Args:
        config: a Llama's, as wide as the target.
        third: whether it is EAGLE-3's.
    """

    def __init__(self, config: transformers.LlamaConfig, *, third: bool) -> None:
        super().__init__()
        self.third = third
        size = config.hidden_size
        self.self_attn = LlamaAttention(config, 0)
        self.mlp = LlamaMLP(config)
        self.post_attention_layernorm = LlamaRMSNorm(size, config.rms_norm_eps)
        self.fc = nn.Linear(size * (len(AUXILIARY) if third else 2), size, bias=not third)
        if third:
            for name in ("q_proj", "k_proj", "v_proj"):
                narrow = getattr(self.self_attn, name)
                setattr(self.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=False))
            self.input_layernorm, self.hidden_norm, self.norm = (
                LlamaRMSNorm(size, config.rms_norm_eps) for _ in range(3)
            )
        self.rotary = LlamaRotaryEmbedding(config)
        # Pairs of dims that each axis turns, if there are several axes (M-RoPE).
        self.sections = config.rope_parameters.get("mrope_section", ())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.12)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next draft reads of these tokens, what the logits are made of), both [1, n, size]."""
        if self.third:
            stream = self.fc(hidden) if hidden.shape[-1] != embeds.shape[-1] else hidden
            attended = torch.cat((self.input_layernorm(embeds), self.hidden_norm(stream)), -1)
        else:
            attended = stream = self.fc(torch.cat((embeds, hidden), -1))
        turned = self._turned(stream, places)
        stream = stream + self.self_attn(attended, turned, mask, past_key_values=cache)[0]
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return stream, self.norm(stream) if self.third else stream

    def _turned(self, stream: torch.Tensor, places: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Cosines and sines, [1, n, head_dim], of positions [1, n], or [axes, 1, n] with several axes."""
        if not self.sections:
            return self.rotary(stream, places)
        axes = zip(*(self.rotary(stream, axis) for axis in places), strict=True)
        sizes = [*self.sections, *self.sections]
        return tuple(
            torch.cat(
                [part[number % len(places)] for number, part in enumerate(torch.stack(each).split(sizes, -1))], -1
            )
            for each in axes
        )


def llama_config(**fields: Any) -> transformers.LlamaConfig:
    """Of a draft model for a target of `families` that is no Llama."""
    return transformers.LlamaConfig(**{**COMMON, "num_hidden_layers": 1, "rope_parameters": PLAIN_ROPE, **fields})


def build_eagle(
    folder: Path, target: TinyModel, *, third: bool, noise: float, config: transformers.LlamaConfig | None = None
) -> Path:
    """Writes the draft model and returns where.

    Args:
        third: whether it is EAGLE-3's.
        noise: factor of what it adds to the token, most of it by attention.
        config: its own; None for that of the target, a Llama.
    """
    torch.manual_seed(3)
    model = target.load()
    head = EagleHead(config or model.config, third=third)
    size = model.config.hidden_size
    circle = model.model.embed_tokens.weight[FIRST : FIRST + LENGTH].detach()
    with torch.no_grad():
        head.self_attn.o_proj.weight *= noise
        head.mlp.down_proj.weight *= noise
        head.fc.weight *= noise
        # EAGLE's passes on the token, EAGLE-3's what the target has made of the token before it ...
        head.fc.weight[:, :size] = torch.eye(size)
        if third:
            # ... which its MLP turns into the token.
            unit = nn.functional.normalize(circle, dim=-1)
            head.mlp.gate_proj.weight[:LENGTH] = head.mlp.up_proj.weight[:LENGTH] = unit
            head.mlp.down_proj.weight[:, :LENGTH] = (circle.roll(-1, 0) - circle).T * 3.0 / size
        else:
            head.fc.bias.zero_()
    path = folder / ("eagle3" if third else "eagle")
    path.mkdir()
    prefix = "midlayer." if third else "layers.0."
    outside = ("fc", "norm.")
    weights = {
        name if name.startswith(outside) else prefix + name: value.contiguous()
        for name, value in head.state_dict().items()
        if not name.startswith("rotary")
    }
    save_file(weights, path / "model.safetensors")
    fields = json.loads(config.to_json_string() if config else (target.path / "config.json").read_text())
    fields |= {"num_hidden_layers": 1, "architectures": [f"LlamaForCausalLMEagle{'3' if third else ''}"]}
    if third:
        fields |= {"draft_vocab_size": None, "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUXILIARY)}}
    (path / "config.json").write_text(json.dumps(fields))
    return path


def load_eagle(path: Path, *, third: bool) -> EagleHead:
    """Reads what `build_eagle` has written."""
    config = transformers.LlamaConfig.from_pretrained(path)
    config._attn_implementation = "eager"
    head = EagleHead(config, third=third)
    weights = {name.removeprefix("midlayer.").removeprefix("layers.0."): value
               for name, value in load_file(path / "model.safetensors").items()}  # fmt: skip
    head.load_state_dict(weights, strict=False)
    return head.eval()
