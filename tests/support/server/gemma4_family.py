"""Random Gemma-4 models, in the class that SGLang serves: with an encoder of images, which their tests do not use.

"gemma-4" is like the large published ones: layers with full attention take their values from the keys' projection. In
"gemma-4-shared", like the small ones, the last layers read the KV of layers before them, and each layer has an input of
its own. "gemma-4-text" is in the class of the language model. "gemma-4-assisted" is as "gemma-4" and repeats itself, so
that another model, its assistant, can draft for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4ImageProcessor,
    Gemma4Processor,
    Gemma4TextConfig,
)

from families import COMMON, HEADS, KV_HEADS, PLAIN_ROPE, WINDOW
from repeating_model import OTHERS, repeat
from tiny_model import VOCABULARY, TinyModel
from word_tokenizer import word_tokenizer

WIDTH, WINDOW_WIDTH = 64, 32
"""Dims of a head in layers with full attention, and in those with a window."""

WORDS = {
    "image_token": "<|image|>",
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
}
IDS = ("image_token_id", "boi_token_id", "eoi_token_id", "audio_token_id", "boa_token_id", "eoa_token_index")
TEXT = {
    **{name: value for name, value in COMMON.items() if name != "tie_word_embeddings"},
    "vocab_size": VOCABULARY + 16,
    "head_dim": WINDOW_WIDTH,
    "global_head_dim": WIDTH,
    "num_key_value_heads": 2 * KV_HEADS,
    "num_global_key_value_heads": KV_HEADS,
    "attention_k_eq_v": True,
    "sliding_window": WINDOW,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        "sliding_attention": PLAIN_ROPE,
    },
}
VARIANTS = {
    "gemma-4": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma-4-shared": {
        "num_hidden_layers": 7,
        # The last three read layers 3, 2 and 3.
        "layer_types": ["sliding_attention", "full_attention"] * 2
        + ["full_attention", "sliding_attention", "full_attention"],
        "num_kv_shared_layers": 3,
        "attention_k_eq_v": False,
        "num_key_value_heads": KV_HEADS,
        "num_global_key_value_heads": None,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": VOCABULARY + 16,
    },
}
TEXT_ALONE = "gemma-4-text"
ASSISTED = "gemma-4-assisted"
NOISE, MIXED = 20.0, 0.05
"""Factors of what its layers, and the hidden state, add to the token that the assistant passes on, so that some of its
drafts fail, by what the layers see."""
VISION = {
    **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32},
    **{"num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64, "initializer_range": 0.12},
}


class Account(torch.nn.Module):
    """What the oracle needs of a model: its layers in `model`, and a call that returns logits."""

    def __init__(self, whole: Gemma4ForConditionalGeneration) -> None:
        super().__init__()
        self.model, self.head = whole.model.language_model, whole.lm_head
        self.config = self.model.config

    def forward(self, **options: Any) -> SimpleNamespace:
        bound = self.config.final_logit_softcapping
        logits = self.head(self.model(**options).last_hidden_state)
        return SimpleNamespace(logits=bound * torch.tanh(logits / bound))


class Gemma4(TinyModel):
    def load(self) -> Account:
        kind = Gemma4ForConditionalGeneration
        return Account(kind.from_pretrained(self.path, dtype=torch.float32, attn_implementation="eager").eval())


def build_gemma4(folder: Path, family: str) -> Gemma4:
    """Writes the model and its processor. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    ids = dict(zip(IDS, range(VOCABULARY, VOCABULARY + len(IDS)), strict=True))
    text = _text_of(family)
    config = Gemma4Config(text_config=text, vision_config=dict(VISION), **ids, video_token_id=VOCABULARY + len(IDS))
    model = Gemma4ForConditionalGeneration._from_config(config, dtype=torch.float32)
    _vary(model.model.language_model)
    path = folder / family
    model.save_pretrained(path)
    save_processor(path)
    if family == "gemma-4":
        as_published(path)
    layers = config.text_config.num_hidden_layers
    return Gemma4(path, folder / f"{family}.safetensors", layers, HEADS, KV_HEADS, WIDTH)


def build_gemma4_text(folder: Path) -> TinyModel:
    """Writes the language model alone. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    # SGLang refuses the file of a language model alone whose layers have heads of different sizes.
    sizes = {"global_head_dim": WINDOW_WIDTH, "num_key_value_heads": KV_HEADS, "num_global_key_value_heads": None}
    config = Gemma4TextConfig(**{**_text_of("gemma-4"), **sizes, "attention_k_eq_v": False})
    model = Gemma4ForCausalLM._from_config(config, dtype=torch.float32)
    _vary(model.model)
    path = folder / TEXT_ALONE
    model.save_pretrained(path)
    fields = json.loads((path / "config.json").read_text())
    fields |= {"swa_head_dim": WINDOW_WIDTH, "swa_v_head_dim": WINDOW_WIDTH, "swa_num_key_value_heads": KV_HEADS}
    (path / "config.json").write_text(json.dumps(fields))
    return TinyModel(
        path, folder / f"{TEXT_ALONE}.safetensors", config.num_hidden_layers, HEADS, KV_HEADS, WINDOW_WIDTH
    )


def build_assisted(folder: Path) -> Gemma4:
    """Writes a model for which an assistant may draft. Nothing has written its statistics yet."""
    tiny = build_gemma4(folder, "gemma-4")
    make_assisted(tiny.path)
    return tiny


@torch.no_grad()
def make_assisted(folder: Path) -> None:
    """Rewrites the weights of a Gemma-4 in its folder so that it repeats itself, with a head of its own."""
    whole = Gemma4ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    whole.config.tie_word_embeddings = whole.config.text_config.tie_word_embeddings = False
    text = whole.model.language_model
    whole.lm_head.weight = nn.Parameter(text.embed_tokens.weight.clone())
    text.norm.weight.uniform_(0.9, 1.1)
    _scale_outputs(text.layers, OTHERS)
    repeat(text.layers, text.embed_tokens.weight, whole.lm_head.weight, OTHERS)
    whole.save_pretrained(folder)
    as_published(folder)


@torch.no_grad()
def build_assistant(folder: Path, target: Path) -> Path:
    """Writes the assistant of a model that `make_assisted` has made, and returns where."""
    torch.manual_seed(3)
    head = Gemma4ForConditionalGeneration.from_pretrained(target, dtype=torch.float32).lm_head.weight
    size = head.shape[1]
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    text = {**json.loads(json.dumps(TEXT)), **layers, "vocab_size_per_layer_input": 0, "tie_word_embeddings": False}
    config = Gemma4AssistantConfig(text_config=text, backbone_hidden_size=size, tie_word_embeddings=False)
    model = Gemma4AssistantForCausalLM(config)
    for name, value in model.named_parameters():
        if "norm" in name:
            value.add_(0.1 * torch.randn_like(value))
    _scale_outputs(model.model.layers, NOISE)
    model.pre_projection.weight.copy_(torch.cat((torch.eye(size), MIXED * torch.randn(size, size)), -1))
    model.lm_head.weight.copy_(head)
    path = folder / "assistant"
    model.save_pretrained(path)
    as_published(path)
    return path


def _scale_outputs(layers: nn.Module, factor: float) -> None:
    """Has attention and MLPs contribute more or less, by the norms that follow them."""
    for name, weight in layers.named_parameters():
        if "post_attention_layernorm" in name or "post_feedforward_layernorm" in name:
            weight *= factor


def _text_of(family: str) -> dict[str, Any]:
    return json.loads(json.dumps({**TEXT, **VARIANTS[family]}))


@torch.no_grad()
def _vary(layers: torch.nn.Module) -> None:
    """Given a language model without its head."""
    for name, value in [*layers.named_parameters(), *layers.named_buffers()]:
        # Norms and factors are all equal in a new model, and would hide that they are not applied.
        if "norm" in name or name.endswith("layer_scalar"):
            value.add_(0.1 * torch.randn_like(value))
    # The head is the embedding: without other signs, each token would be followed by itself.
    layers.norm.weight.normal_()
    # No answer has what stands for an image: of all rows, these have the score 0.
    layers.embed_tokens.weight[VOCABULARY:] = 0


def as_published(folder: Path) -> None:
    """Names the two kinds of heads as published files do; transformers writes them for each layer."""
    file = folder / "config.json"
    fields = json.loads(file.read_text())
    del fields["text_config"]["per_layer_config"]
    fields["text_config"] |= {name: TEXT[name] for name in ("global_head_dim", "num_global_key_value_heads")}
    file.write_text(json.dumps(fields))


def save_processor(path: Path) -> None:
    tokenizer = word_tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.add_tokens([transformers.AddedToken(word, special=True, normalized=False) for word in WORDS.values()])
    tokenizer._set_model_specific_special_tokens(WORDS)
    parts = (transformers.Gemma4AudioFeatureExtractor(), Gemma4ImageProcessor(), tokenizer)
    Gemma4Processor(*parts, transformers.Gemma4VideoProcessor()).save_pretrained(path)
