"""A random Kimi-K2.5 as published: with latent KV, and a processor that comes with the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import Kimi_K25ImageProcessor

from families import FAMILIES
from intern_family import OF_TRANSFORMERS

WORDS = ("<|media_begin|>", "<|media_end|>", "<|media_pad|>")
PATCHES = 10
"""In a row and a column of the tests' images, and of the encoder's positions, so that none is interpolated."""
PIXELS = (14 * PATCHES, 14 * PATCHES)
TOKENS = PATCHES * PATCHES // 4
"""Of an image."""
TEXT = {"model_type": "deepseek_v3", **FAMILIES["deepseek-v3"].settings}
VISION = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"pos_emb_height": PATCHES, "pos_emb_width": PATCHES, "initializer_range": 0.12},
}
# What SGLang asks of the published one.
_PROCESSOR = """from transformers import AutoTokenizer, Kimi_K25ImageProcessor


class Media:
    media_proc_cfg = {
        **{"patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 16384, "patch_limit_on_one_side": 512},
        **{"fixed_output_tokens": None, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    }

    def media_tokens_calculator(self, media):
        width, height = media["image"].size
        return width * height // 28**2


class Processor:
    def __init__(self, tokenizer):
        self.tokenizer, self.image_processor, self.media_processor = tokenizer, Kimi_K25ImageProcessor(), Media()

    @classmethod
    def from_pretrained(cls, folder, **_):
        return cls(AutoTokenizer.from_pretrained(folder))

    @classmethod
    def register_for_auto_class(cls, *_):
        pass

    def __call__(self, text, medias=(), **_):
        given = dict(self.tokenizer(text, return_tensors="pt"))
        if medias:
            media = self.image_processor([each["image"] for each in medias], return_tensors="pt")
            given |= {"pixel_values": media["pixel_values"], "grid_thws": media["image_grid_thw"]}
        return given
"""


def as_published(folder: Path) -> None:
    """Gives the files their published form, and keeps those of transformers in a folder inside."""
    other = folder / OF_TRANSFORMERS
    other.mkdir()
    for name in ("model.safetensors", "config.json"):
        (folder / name).rename(other / name)
    weights = load_file(other / "model.safetensors")
    save_file({_published(name): value for name, value in weights.items()}, folder / "model.safetensors")
    fields = json.loads((other / "config.json").read_text())
    own = {f"vt_{name}": value for name, value in VISION.items() if not name.startswith("pos")}
    own |= {f"init_{name}": PATCHES for name in ("pos_emb_height", "pos_emb_width")}
    text = {**fields["text_config"], "model_type": "kimi_k2", "architectures": ["DeepseekV3ForCausalLM"]}
    published = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "auto_map": {"AutoProcessor": "processing.Processor"},
        "model_type": "kimi_k25",
        "dtype": "float32",
        "media_placeholder_token_id": fields["image_token_id"],
        "text_config": text,
        "vision_config": {**VISION, **own, "text_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(published))
    (folder / "processing.py").write_text(_PROCESSOR)


def _published(name: str) -> str:
    """The published name of a weight, by that which transformers writes."""
    if name.startswith("language_model."):
        return name.replace(".blocks.", ".layers.")
    return name.replace("model.mm_projector", "mm_projector").replace("encoder.patch_embed", "patch_embed")


@dataclass(frozen=True)
class Reader:
    """What transformers' model gets of a text and the image in it."""

    tokenizer: Any

    def __call__(self, text: list[str], images: list[Image.Image] | None, return_tensors: str) -> dict[str, Any]:
        whole = [part.replace(WORDS[2], WORDS[2] * TOKENS) for part in text]
        given = dict(self.tokenizer(whole, return_tensors=return_tensors))
        return {**given, **Kimi_K25ImageProcessor()(images, return_tensors=return_tensors)} if images else given
