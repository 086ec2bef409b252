"""Random models that repeat themselves, with the layer that drafts for them (multi-token prediction, MTP)."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from families import LAYERS, build_family, config_of
from latent_family import build_latent
from repeating import make_repeating
from tiny_model import TinyModel

# The family without the layer, and how it is built.
DRAFTING = {"glm-4.5-mtp": ("glm-4.5-all", build_family), "deepseek-v3-mtp": ("deepseek-v3", build_latent)}
NORMS = ("enorm", "hnorm", "shared_head.norm")


def build_mtp(folder: Path, family: str, noise: float = 1.8) -> TinyModel:
    """Writes the model with its draft layer. Nothing has written its statistics yet.

    Args:
        family: one of DRAFTING.
        noise: factor of what the layer adds to the token that it passes on.
    """
    base, build = DRAFTING[family]
    tiny = build(folder, base)
    make_repeating(tiny)
    torch.manual_seed(5)
    config = config_of(base)
    size, prefix = config.hidden_size, f"model.layers.{LAYERS}."
    mix = torch.cat((torch.eye(size), 0.12 * noise * torch.randn(size, size)), -1)
    added = {f"{prefix}eh_proj.weight": mix, **{f"{prefix}{name}.weight": torch.ones(size) for name in NORMS}}
    with TemporaryDirectory() as deeper:
        # transformers writes the names of the published checkpoints.
        transformers.AutoModelForCausalLM.from_config(_deeper(config), dtype=torch.float32).save_pretrained(deeper)
        for name, weight in load_file(Path(deeper) / "model.safetensors").items():
            if name.startswith(prefix):
                added[name] = weight * noise if "o_proj" in name or "down_proj" in name else weight
    file = tiny.path / "model.safetensors"
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    settings = tiny.path / "config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "num_nextn_predict_layers": 1}))
    return tiny


def _deeper(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers = LAYERS + 1
    return config


class MtpHead(nn.Module):
    """The draft layer, with SGLang's order of its parts (sglang/srt/models/glm4_moe_nextn.py, deepseek_nextn.py)."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        config = _deeper(transformers.AutoConfig.from_pretrained(path))
        model = transformers.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.decoder, self.rotary = model.model.layers[LAYERS], model.model.rotary_emb
        self.decoder.self_attn.layer_idx = 0
        weights, prefix = load_file(path / "model.safetensors"), f"model.layers.{LAYERS}."
        self.mix = weights[f"{prefix}eh_proj.weight"]
        norm = type(model.model.norm)
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, config.rms_norm_eps) for _ in NORMS)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next draft reads of these tokens, what the logits are made of), both [1, n, size]."""
        stream = torch.cat((self.enorm(embeds), self.hnorm(hidden)), -1) @ self.mix.T
        turned = self.rotary(stream, places)
        stream = self.decoder(stream, attention_mask=mask, position_embeddings=turned, past_key_values=cache)
        made = self.norm(stream)
        return made, made
