"""Random models that take images, each with its processor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file

import gemma4_family
import intern_family
import kimi_family
from families import COMMON, FAMILIES, HEAD_DIM, HEADS, KV_HEADS, LAYERS, PLAIN_ROPE, WINDOW
from harness import BUDGET, RECENT, REFERENCE
from latent_family import pool_rope
from state_settings import QWEN3_5
from tiny_model import VOCABULARY, TinyModel, save_random_stats
from word_tokenizer import added_words, word_tokenizer

QWEN_WORDS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
GLM_WORDS = (
    *("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>"),
    *("<|begin_of_video|>", "<|end_of_video|>"),
)
PIXTRAL_WORDS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
GEMMA_3_WORDS = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
ENCODER = {"depth": 2, "hidden_size": 64, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 128}
ENCODER["initializer_range"] = 0.12
TEXT = {name: value for name, value in COMMON.items() if name != "tie_word_embeddings"}


@dataclass(frozen=True)
class VisionFamily:
    """
    Attributes:
        name: that of its classes in transformers, without their endings.
        module: SGLang's module of the model.
        words: what its tokenizer has in addition to words, from id VOCABULARY on.
        around: what stands for an image in a text.
        text, vision: what differs in its text and vision configurations.
        whole: further fields.
        processor: name of its processor's class, if it has one.
        image_processor: the same of its image processor, if it has a processor.
        video_processor, feature_extractor: the same of what it has for videos and sound, if it does.
        image_settings, processor_settings: what differs in their configurations.
        pixels: width and height of the tests' images.
        modules: further modules of SGLang that it needs.
        flags: further flags of its servers.
        head_dim: dims of a head in layers that attend to all tokens.
        interleaved: whether neighbouring dims of a head turn together.
        latent: whether KV is latent, in one head.
        window: tokens that a query of a window layer sees; 0 without such layers.
        tokenizer: makes its tokenizer, without `word_tokenizer`.
        named_words: those of `word_tokenizer` that its processor finds by names of the tokenizer.
        as_published: gives the files in a model's folder the form that published ones have, and SGLang reads.
        reader: makes, of its tokenizer, what the account reads prompts with, if transformers has no processor for it.
    """

    name: str
    module: str
    words: tuple[str, ...]
    around: str
    text: dict[str, Any]
    vision: dict[str, Any]
    whole: dict[str, Any]
    processor: str | None = None
    image_processor: str = ""
    video_processor: str | None = None
    feature_extractor: str | None = None
    image_settings: dict[str, Any] = field(default_factory=dict)
    processor_settings: dict[str, Any] = field(default_factory=dict)
    pixels: tuple[int, int] = (168, 112)
    modules: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    head_dim: int = HEAD_DIM
    interleaved: bool = False
    latent: bool = False
    window: int = 0
    tokenizer: Callable[[], Any] = word_tokenizer
    named_words: dict[str, str] = field(default_factory=dict)
    as_published: Callable[[Path], None] | None = None
    reader: Callable[[Any], Any] | None = None


def _ids(words: tuple[str, ...], **named: str) -> dict[str, int]:
    return {name: VOCABULARY + words.index(word) for name, word in named.items()}


def _axes(*section: int, **more: Any) -> dict[str, Any]:
    return {**PLAIN_ROPE, "mrope_section": list(section), **more}


def _encoder_in_model(folder: Path) -> None:
    """Names an encoder's weights as Gemma-3 does."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    renamed = {name.replace("vision_tower.", "vision_tower.vision_model."): value for name, value in weights.items()}
    save_file(renamed, file, {"format": "pt"})


def _experts_transposed(folder: Path) -> None:
    """Exchanges rows and columns of the experts' weights, as Qwen3-VL has them."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for name, value in weights.items():
        if value.ndim == 3 and ".experts." in name:
            weights[name] = value.transpose(1, 2).contiguous()
    save_file(weights, file, {"format": "pt"})


QWEN_IDS = _ids(
    QWEN_WORDS,
    vision_start_token_id="<|vision_start|>",
    vision_end_token_id="<|vision_end|>",
    image_token_id="<|image_pad|>",
    video_token_id="<|video_pad|>",
)
GLM_IDS = _ids(
    GLM_WORDS,
    image_start_token_id="<|begin_of_image|>",
    image_end_token_id="<|end_of_image|>",
    image_token_id="<|image|>",
    video_token_id="<|video|>",
    video_start_token_id="<|begin_of_video|>",
    video_end_token_id="<|end_of_video|>",
)
EXPERTS = {
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "num_experts": 4},
    # Every expert, so that no rounding decides which.
    "num_experts_per_tok": 4,
}
QWEN = {
    "words": QWEN_WORDS,
    "around": "<|vision_start|><|image_pad|><|vision_end|>",
    "whole": QWEN_IDS,
    "image_processor": "Qwen2VLImageProcessor",
}
GLM = {
    "words": GLM_WORDS,
    "around": "<|begin_of_image|><|image|><|end_of_image|>",
    "vision": {**ENCODER, "patch_size": 14, "image_size": 112},
    "whole": GLM_IDS,
    "processor": "Glm4vProcessor",
    "image_processor": "Glm4vImageProcessor",
    "video_processor": "Glm4vVideoProcessor",
    "image_settings": {"size": {"shortest_edge": 12544, "longest_edge": 1254400}},
}
VISION_FAMILIES = {
    "qwen2.5-vl": VisionFamily(
        "Qwen2_5_VL",
        "qwen2_5_vl",
        text={"rope_parameters": _axes(4, 6, 6)},
        vision={**ENCODER, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        processor="Qwen2_5_VLProcessor",
        video_processor="Qwen2VLVideoProcessor",
        modules=("qwen2",),
        **QWEN,
    ),
    "qwen2-vl": VisionFamily(
        "Qwen2VL",
        "qwen2_vl",
        text={"rope_parameters": _axes(4, 6, 6)},
        vision={
            **{"depth": 2, "embed_dim": 64, "hidden_size": 128, "num_heads": 2, "mlp_ratio": 1, "patch_size": 14},
            # Of published configurations, unknown to transformers, and read by SGLang.
            **{"in_chans": 3, "initializer_range": 0.12},
        },
        processor="Qwen2VLProcessor",
        video_processor="Qwen2VLVideoProcessor",
        modules=("qwen2",),
        **QWEN,
    ),
    "qwen3-vl": VisionFamily(
        "Qwen3VL",
        "qwen3_vl",
        text={"rope_parameters": _axes(6, 5, 5, mrope_interleaved=True)},
        vision={**ENCODER, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        processor="Qwen3VLProcessor",
        video_processor="Qwen3VLVideoProcessor",
        image_settings={"patch_size": 16},
        pixels=(192, 128),
        modules=("qwen3",),
        **QWEN,
    ),
    "qwen3.5": VisionFamily(
        "Qwen3_5",
        "qwen3_5",
        text={**QWEN3_5, "full_attention_interval": 2},
        # Of published configurations, unknown to transformers, and read by SGLang.
        vision={**ENCODER, "patch_size": 16, "num_position_embeddings": 64, "deepstack_visual_indexes": []},
        processor="Qwen3VLProcessor",
        video_processor="Qwen3VLVideoProcessor",
        image_settings={"patch_size": 16},
        pixels=(192, 128),
        modules=("qwen3", "qwen3_vl", "qwen3_5_text"),
        tokenizer=added_words,
        **QWEN,
    ),
    "glm-4.1v": VisionFamily(
        "Glm4v",
        "glm4v",
        text={"rope_parameters": _axes(2, 3, 3, partial_rotary_factor=0.5)},
        modules=("glm4",),
        interleaved=True,
        **GLM,
    ),
    "glm-4.5v": VisionFamily(
        "Glm4vMoe",
        "glm4v_moe",
        text={
            **{
                name: value
                for name, value in FAMILIES["glm-4.5"].settings.items()
                if name not in ("num_mtp_layers", "use_qk_norm")
            },
            "rope_parameters": _axes(2, 3, 3, partial_rotary_factor=0.5),
        },
        modules=("glm4v", "glm4_moe"),
        **GLM,
    ),
    "mistral-small-3": VisionFamily(
        "Mistral3",
        "mistral",
        words=PIXTRAL_WORDS,
        around="[IMG]",
        text={"model_type": "mistral", "rope_parameters": PLAIN_ROPE, "sliding_window": None},
        vision={
            **{"model_type": "pixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
            **{"num_attention_heads": 2, "head_dim": 32, "image_size": 336, "patch_size": 14},
            # SGLang computes this one, which published models name, without reading it from the file.
            **{"hidden_act": "silu", "initializer_range": 0.12},
        },
        whole=_ids(PIXTRAL_WORDS, image_token_index="[IMG]"),
        processor="PixtralProcessor",
        image_processor="PixtralImageProcessor",
        image_settings={"patch_size": 14, "size": {"longest_edge": 336}},
        processor_settings={"patch_size": 14, "spatial_merge_size": 2},
        modules=("llava", "llama", "pixtral"),
    ),
    "gemma-3": VisionFamily(
        "Gemma3",
        "gemma3_mm",
        words=tuple(GEMMA_3_WORDS.values()),
        around="<start_of_image>",
        text=FAMILIES["gemma3"].settings,
        vision={
            **{"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
            **{"image_size": 140, "patch_size": 14, "vision_use_head": False, "initializer_range": 0.12},
            # SGLang computes this one in any case; published ones say gelu_pytorch_tanh.
            "hidden_act": "quick_gelu",
        },
        whole={
            **_ids(
                tuple(GEMMA_3_WORDS.values()),
                image_token_index="<image_soft_token>",
                boi_token_index="<start_of_image>",
                eoi_token_index="<end_of_image>",
            ),
            **{"mm_tokens_per_image": 25, "tie_word_embeddings": True},
        },
        processor="Gemma3Processor",
        image_processor="Gemma3ImageProcessor",
        image_settings={"size": {"height": 140, "width": 140}, "image_seq_length": 25},
        processor_settings={"image_seq_length": 25},
        modules=("gemma3_causal", "siglip"),
        flags=("--enable-multimodal",),
        window=WINDOW,
        named_words=GEMMA_3_WORDS,
        as_published=_encoder_in_model,
    ),
    "internvl": VisionFamily(
        "InternVL",
        "internvl",
        words=intern_family.WORDS,
        around="<image>",
        text=intern_family.TEXT,
        vision=intern_family.VISION,
        whole=_ids(intern_family.WORDS, image_token_id="<IMG_CONTEXT>"),
        pixels=intern_family.PIXELS,
        modules=("qwen3",),
        as_published=intern_family.as_published,
        reader=intern_family.Reader,
    ),
    "kimi-k2.5": VisionFamily(
        "Kimi_K25",
        "kimi_k25",
        words=kimi_family.WORDS,
        around="".join(kimi_family.WORDS[index] for index in (0, 2, 1)),
        text=kimi_family.TEXT,
        vision=kimi_family.VISION,
        whole={**_ids(kimi_family.WORDS, image_token_id="<|media_pad|>"), "projection_hidden_size": 64},
        pixels=kimi_family.PIXELS,
        modules=("deepseek_v2",),
        flags=("--trust-remote-code",),
        head_dim=kimi_family.TEXT["kv_lora_rank"] + kimi_family.TEXT["qk_rope_head_dim"],
        interleaved=True,
        latent=True,
        as_published=kimi_family.as_published,
        reader=kimi_family.Reader,
    ),
    "gemma-4": VisionFamily(
        "Gemma4",
        "gemma4_mm",
        words=tuple(gemma4_family.WORDS.values()),
        around="<|image|>",
        text={**gemma4_family.TEXT, **gemma4_family.VARIANTS["gemma-4"]},
        vision={**gemma4_family.VISION, "num_hidden_layers": 2},
        whole={
            **dict(zip(gemma4_family.IDS, range(VOCABULARY, VOCABULARY + len(gemma4_family.IDS)), strict=True)),
            **{"video_token_id": VOCABULARY + len(gemma4_family.IDS), "tie_word_embeddings": True},
        },
        processor="Gemma4Processor",
        image_processor="Gemma4ImageProcessor",
        video_processor="Gemma4VideoProcessor",
        feature_extractor="Gemma4AudioFeatureExtractor",
        image_settings={"patch_size": 4, "max_soft_tokens": 70},
        # As many tokens as an image may have: SGLang counts what fills up a smaller one to its first token.
        pixels=(120, 84),
        flags=("--attention-backend", REFERENCE),
        head_dim=gemma4_family.WIDTH,
        window=WINDOW,
        named_words=gemma4_family.WORDS,
        as_published=gemma4_family.as_published,
    ),
}
VISION_FAMILIES |= {
    gemma4_family.ASSISTED: replace(
        VISION_FAMILIES["gemma-4"], modules=("gemma4_mtp",), as_published=gemma4_family.make_assisted
    ),
    "qwen3.5-moe": replace(
        VISION_FAMILIES["qwen3.5"], name="Qwen3_5Moe", text={**VISION_FAMILIES["qwen3.5"].text, **EXPERTS}
    ),
    "qwen3-vl-moe": replace(
        VISION_FAMILIES["qwen3-vl"],
        name="Qwen3VLMoe",
        module="qwen3_vl_moe",
        # Of square weights transformers does not know which way round they are.
        text={**VISION_FAMILIES["qwen3-vl"].text, **EXPERTS, "moe_intermediate_size": 48},
        # SGLang takes the published number of layers that add to the language model's in any case.
        vision={**VISION_FAMILIES["qwen3-vl"].vision, "depth": 3, "deepstack_visual_indexes": [0, 1, 2]},
        modules=("qwen3", "qwen3_moe", "qwen3_vl"),
        as_published=_experts_transposed,
    ),
}


@dataclass(frozen=True)
class VisionModel(TinyModel):
    """A tiny model that takes images; `family` names it in VISION_FAMILIES."""

    family: str = ""

    def load(self) -> Any:
        kind, folder = transformers.AutoModelForImageTextToText, self.path / intern_family.OF_TRANSFORMERS
        folder = folder if folder.exists() else self.path
        return kind.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()

    def processor(self) -> Any:
        reader = VISION_FAMILIES[self.family].reader
        if reader:
            return reader(transformers.AutoTokenizer.from_pretrained(self.path))
        return transformers.AutoProcessor.from_pretrained(self.path)

    @property
    def modules(self) -> tuple[str, ...]:
        """SGLang's modules that serve it."""
        found = VISION_FAMILIES[self.family]
        return found.module, *found.modules

    @property
    def recent(self) -> int:
        """Newest tokens that a round of its tests' servers keeps: those that a window layer sees are among them."""
        window = VISION_FAMILIES[self.family].window
        return window + 1 if window else RECENT

    @property
    def budget(self) -> int:
        """Tokens that a round of its tests' servers keeps."""
        return BUDGET + 16 if VISION_FAMILIES[self.family].window else BUDGET

    def with_image(self, before: str, after: str) -> str:
        """A text with one image in it."""
        return f"{before} {VISION_FAMILIES[self.family].around} {after}"

    def picture(self, seed: int) -> Image.Image:
        """A random image."""
        width, height = VISION_FAMILIES[self.family].pixels
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(256, (height, width, 3), generator=generator, dtype=torch.uint8)
        return Image.fromarray(pixels.numpy())


def build_vision_model(folder: Path, family: str) -> VisionModel:
    """Writes the model, its processor, and random statistics for it."""
    from sglang_triattn.model.rope import rope_of_transformers

    found = VISION_FAMILIES[family]
    path = folder / family
    stats = folder / f"{family}.safetensors"
    kv_heads = 1 if found.latent else KV_HEADS
    tiny = VisionModel(path, stats, LAYERS, HEADS, kv_heads, found.head_dim, found.interleaved, family)
    torch.manual_seed(0)
    # Configurations complete the dicts that they are given.
    text = copy.deepcopy({**TEXT, "vocab_size": VOCABULARY + 16, **found.text})
    config = getattr(transformers, f"{found.name}Config")(
        text_config=text, vision_config=copy.deepcopy(found.vision), **{"tie_word_embeddings": False, **found.whole}
    )
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        # Buffers of Gemma-4 scale its layers.
        factors = [item for item in model.named_buffers() if item[0].endswith("layer_scalar")]
        for name, parameter in [*model.named_parameters(), *factors]:
            # Norms and biases are all equal in a new model, and would hide that they are not applied, as would a
            # projection of images that is 0.
            if parameter.ndim == 1 or name.endswith("bias") or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
        if config.tie_word_embeddings:
            # Without other signs, each token would be followed by itself.
            model.model.language_model.norm.weight.normal_()
        # No answer has what stands for an image: of all rows, these have the score 0.
        model.lm_head.weight[VOCABULARY:] = 0
    model.save_pretrained(path)
    if found.as_published:
        found.as_published(path)
    tokenizer = found.tokenizer()
    tokenizer.pad_token = "<unk>"
    tokenizer.add_tokens([transformers.AddedToken(word, special=True, normalized=False) for word in found.words])
    tokenizer._set_model_specific_special_tokens(found.named_words)
    if found.processor:
        parts = {"image_processor": getattr(transformers, found.image_processor)(**found.image_settings)}
        for kind in ("video_processor", "feature_extractor"):
            if getattr(found, kind):
                parts[kind] = getattr(transformers, getattr(found, kind))()
        processor = getattr(transformers, found.processor)
        processor(tokenizer=tokenizer, **parts, **found.processor_settings).save_pretrained(path)
    else:
        tokenizer.save_pretrained(path)
    kinds = getattr(config.text_config, "layer_types", None) or []
    layers = [number for number in range(LAYERS) if not kinds or kinds[number] == "full_attention"]
    rope = rope_of_transformers(model.model.language_model, config.text_config)
    start = found.head_dim - rope.rotary_dim if found.latent else 0
    save_random_stats(tiny, pool_rope(rope) if found.latent else rope, tuple(layers), (True,) * len(layers), start)
    return tiny
