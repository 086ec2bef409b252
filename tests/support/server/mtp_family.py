"""Random models that repeat themselves, with the layer that drafts for them (multi-token prediction, MTP)."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import DynamicCache

from families import LAYERS, build_family
from latent_family import build_latent
from repeating_model import make_repeating
from state_family import build_whole_qwen
from tiny_model import TinyModel

# The layer's number in transformers, which has none that drafts: one after the model's last.
_AS_ONE_MORE = f"model.layers.{LAYERS}."


@dataclass(frozen=True)
class Drafting:
    """
    Attributes:
        family: the family without the layer, or that of its text.
        build: how that is built.
        layer: what the names of the decoder layer's weights begin with.
        mix: what joins a token and the hidden state before it.
        norms: of the token, of the hidden state, and of what the layer returns.
        unit: value of a norm's weight that changes nothing.
        counted: whether the model's file counts the layer.
        noise: factor of what the layer adds to the token that it passes on, so that some of its drafts fail.
    """

    family: str
    build: Callable[[Path, str], TinyModel] = build_family
    layer: str = _AS_ONE_MORE
    mix: str = f"{_AS_ONE_MORE}eh_proj"
    norms: tuple[str, ...] = tuple(f"{_AS_ONE_MORE}{name}" for name in ("enorm", "hnorm", "shared_head.norm"))
    unit: float = 1.0
    counted: bool = True
    noise: float = 1.8


_QWEN = {
    "layer": "mtp.layers.0.",
    "mix": "mtp.fc",
    "norms": ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
    "unit": 0.0,
    "counted": False,
}
DRAFTING = {
    "glm-4.5-mtp": Drafting("glm-4.5-all"),
    "deepseek-v3-mtp": Drafting("deepseek-v3", build_latent),
    "qwen3-next-mtp": Drafting("qwen3-next", **_QWEN, noise=3.0),
    "qwen3-next-twice-mtp": Drafting("qwen3-next-twice", **_QWEN, noise=3.0),
    "qwen3.5-mtp": Drafting("qwen3.5", **_QWEN),
    "qwen3.5-whole-mtp": Drafting("qwen3.5", build_whole_qwen, **_QWEN),
    "qwen3.5-moe-whole-mtp": Drafting("qwen3.5-moe", build_whole_qwen, **_QWEN),
}


def build_mtp(folder: Path, family: str) -> TinyModel:
    """Writes the model, of one of DRAFTING, with its draft layer. Nothing has written its statistics yet."""
    drafting = DRAFTING[family]
    noise = drafting.noise
    tiny = drafting.build(folder, drafting.family)
    make_repeating(tiny)
    torch.manual_seed(5)
    config = _text_config(tiny.path)
    size = config.hidden_size
    mix = torch.cat((torch.eye(size), 0.12 * noise * torch.randn(size, size)), -1)
    norms = {f"{name}.weight": torch.full((size,), drafting.unit) for name in drafting.norms}
    added = {f"{drafting.mix}.weight": mix, **norms}
    with TemporaryDirectory() as deeper:
        # transformers writes the names of the published checkpoints.
        transformers.AutoModelForCausalLM.from_config(_deeper(config), dtype=torch.float32).save_pretrained(deeper)
        for name, weight in load_file(Path(deeper) / "model.safetensors").items():
            if name.startswith(_AS_ONE_MORE):
                loud = weight * noise if "o_proj" in name or "down_proj" in name else weight
                added[drafting.layer + name.removeprefix(_AS_ONE_MORE)] = loud
    file = tiny.path / "model.safetensors"
    save_file({**load_file(file), **added}, file, metadata={"format": "pt"})
    if drafting.counted:
        settings = tiny.path / "config.json"
        settings.write_text(json.dumps({**json.loads(settings.read_text()), "num_nextn_predict_layers": 1}))
    return tiny


def _text_config(path: Path) -> transformers.PreTrainedConfig:
    return transformers.AutoConfig.from_pretrained(path).get_text_config()


def _deeper(config: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers = LAYERS + 1
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, "full_attention"]
    return config


class MtpHead(nn.Module):
    """The draft layer, with SGLang's order of its parts (sglang/srt/models/glm4_moe_nextn.py, deepseek_nextn.py,
    qwen3_next_mtp.py, qwen3_5_mtp.py)."""

    def __init__(self, path: Path, family: str) -> None:
        super().__init__()
        drafting, weights = DRAFTING[family], load_file(path / "model.safetensors")
        config = _deeper(_text_config(path))
        with TemporaryDirectory() as folder:
            renamed = {
                _AS_ONE_MORE + name.removeprefix(drafting.layer) if name.startswith(drafting.layer) else name: weight
                for name, weight in weights.items()
            }
            save_file(renamed, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            config.save_pretrained(folder)
            model = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, dtype=torch.float32, attn_implementation="eager"
            ).eval()
        self.decoder, self.rotary = model.model.layers[LAYERS], model.model.rotary_emb
        self.decoder.self_attn.layer_idx = 0
        self.mix = weights[f"{drafting.mix}.weight"]
        norm, eps = type(model.model.norm), config.rms_norm_eps
        # Those of a new model change nothing.
        self.enorm, self.hnorm, self.norm = (norm(config.hidden_size, eps) for _ in drafting.norms)

    def forward(
        self, embeds: torch.Tensor, hidden: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(what the next draft reads of these tokens, what the logits are made of), both [1, n, size]."""
        stream = torch.cat((self.enorm(embeds), self.hnorm(hidden)), -1) @ self.mix.T
        turned = self.rotary(stream, places)
        stream = self.decoder(stream, attention_mask=mask, position_embeddings=turned, past_key_values=cache)
        made = self.norm(stream)
        return made, made
