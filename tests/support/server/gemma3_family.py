"""A random Gemma-3 in the class that takes images, which no test sends."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from families import COMMON, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, LAYERS
from tiny_model import VOCABULARY, TinyModel
from words import word_tokenizer

WORDS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
VISION = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    **{"image_size": 56, "patch_size": 14, "vision_use_head": False},
}


class Account(torch.nn.Module):
    """What the oracle needs of a model: its layers in `model`, and a call that returns logits."""

    def __init__(self, whole: Gemma3ForConditionalGeneration) -> None:
        super().__init__()
        self.model, self.head = whole.model.language_model, whole.lm_head
        self.config = self.model.config

    def forward(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.model(**options).last_hidden_state))


class Gemma3(TinyModel):
    def load(self) -> Account:
        kind = Gemma3ForConditionalGeneration
        return Account(kind.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval())


def build_gemma3(folder: Path) -> Gemma3:
    """Writes the model and its processor. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    ids = dict(
        zip(("image_token_index", "boi_token_index", "eoi_token_index"), range(VOCABULARY, VOCABULARY + 3), strict=True)
    )
    text = json.loads(json.dumps({**COMMON, **FAMILIES["gemma3"].settings, "vocab_size": VOCABULARY + 16}))
    config = Gemma3Config(text_config=text, vision_config=dict(VISION), mm_tokens_per_image=4, **ids)
    model = Gemma3ForConditionalGeneration._from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            # Norms are all equal in a new model, and would hide that they are not applied.
            if "language_model" in name and "norm" in name:
                value.add_(0.1 * torch.randn_like(value))
        # The head is the embedding: without other signs, each token would be followed by itself.
        model.model.language_model.norm.weight.normal_()
        # No answer has what stands for an image: of all rows, these have the score 0.
        model.get_input_embeddings().weight[VOCABULARY:] = 0
    path = folder / "gemma3-with-images"
    model.save_pretrained(path)
    as_published(path / "model.safetensors")
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.add_tokens([transformers.AddedToken(word, special=True, normalized=False) for word in WORDS.values()])
    tokenizer._set_model_specific_special_tokens(WORDS)
    images = transformers.Gemma3ImageProcessor(size={"height": 56, "width": 56}, image_seq_length=4)
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=4).save_pretrained(path)
    return Gemma3(path, folder / "gemma3-with-images.safetensors", LAYERS, HEADS, KV_HEADS, HEAD_DIM)


def as_published(file: Path) -> None:
    """Gives the encoder's weights the names that published files have, and SGLang reads."""
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(renamed, file, {"format": "pt"})
