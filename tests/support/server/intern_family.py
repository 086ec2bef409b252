"""A random InternVL as published, with weights and a configuration that transformers names otherwise.

SGLang cuts an image into tiles of TILE x TILE pixels, as many in a row and a column as fit its shape, and adds the
whole image as a further tile. No processor of transformers resizes them as SGLang does, so `Reader` follows that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

OF_TRANSFORMERS = "transformers"
"""The folder, in that of a model, that has what transformers reads."""
WORDS = ("<img>", "</img>", "<IMG_CONTEXT>", "<|video_pad|>")
TILE = 448
PER_TILE = 4
"""Tokens of a tile."""
COLUMNS = 5
"""Tiles of the tests' images, in one row."""
PIXELS = (32 * COLUMNS, 32)
TEXT = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
VISION = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"image_size": TILE, "patch_size": TILE // 4, "attention_bias": True, "initializer_range": 0.12},
}
# The names of published weights, by those of transformers.
_NAMES = {
    "vision_tower.": "vision_model.",
    "encoder.layer.": "encoder.layers.",
    "cls_token": "class_embedding",
    "position_embeddings": "position_embedding",
    "patch_embeddings.projection": "patch_embedding",
    "attention.projection_layer": "attn.proj",
    "layernorm_before": "norm1",
    "layernorm_after": "norm2",
    "lambda_": "ls",
    "multi_modal_projector.layer_norm": "mlp1.0",
    "multi_modal_projector.linear_1": "mlp1.1",
    "multi_modal_projector.linear_2": "mlp1.3",
}


def as_published(folder: Path) -> None:
    """Gives the files their published form, and keeps those of transformers in a folder inside."""
    other = folder / OF_TRANSFORMERS
    other.mkdir()
    weights = load_file(folder / "model.safetensors")
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(other / name)
    for name in [name for name in weights if ".attention.q_proj." in name]:
        parts = [weights.pop(name.replace("q_proj", part)) for part in ("q_proj", "k_proj", "v_proj")]
        weights[name.replace("attention.q_proj", "attn.qkv")] = torch.cat(parts)
    renamed = {}
    for name, value in weights.items():
        for old, new in _NAMES.items():
            name = name.replace(old, new)
        renamed[name] = value
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    fields = json.loads((other / "config.json").read_text())
    vision = fields["vision_config"]
    own = {"model_type": "intern_vit_6b", "qkv_bias": True, "qk_normalization": False, "use_flash_attn": False}
    own |= {"image_size": TILE, "patch_size": VISION["patch_size"]}
    published = {
        "architectures": ["InternVLChatModel"],
        "model_type": "internvl_chat",
        "dtype": "float32",
        "llm_config": {**fields["text_config"], "architectures": TEXT["architectures"]},
        "vision_config": {**vision, **own},
        **{"downsample_ratio": 0.5, "select_layer": -1, "ps_version": "v2", "force_image_size": TILE},
        **{"dynamic_image_size": True, "use_thumbnail": True, "max_dynamic_patch": 12, "template": "internvl2_5"},
    }
    (folder / "config.json").write_text(json.dumps(published))


@dataclass(frozen=True)
class Reader:
    """What transformers' model gets of a text and the image in it."""

    tokenizer: Any

    def __call__(self, text: list[str], images: list[Image.Image] | None, return_tensors: str) -> dict[str, Any]:
        tiles = torch.cat([self._tiles(image) for image in images or ()]) if images else None
        inner = "" if tiles is None else WORDS[2] * (PER_TILE * len(tiles))
        texts = [part.replace("<image>", f"{WORDS[0]}{inner}{WORDS[1]}") for part in text]
        given = dict(self.tokenizer(texts, return_tensors=return_tensors))
        return given if tiles is None else {**given, "pixel_values": tiles}

    @staticmethod
    def _tiles(image: Image.Image) -> torch.Tensor:
        """[COLUMNS + 1, 3, TILE, TILE] float32, rounded to bfloat16 as SGLang does."""
        pixels = torch.from_numpy(numpy.array(image)).permute(2, 0, 1) / 255
        mean, deviation = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]])[..., None, None]
        pixels = ((pixels - mean) / deviation)[None]

        def resized(width: int) -> torch.Tensor:
            return torch.nn.functional.interpolate(pixels, (TILE, width), mode="bicubic")

        whole = resized(TILE * COLUMNS).unfold(3, TILE, TILE)[0].permute(2, 0, 1, 3)
        return torch.cat([whole, resized(TILE)]).bfloat16().float()
