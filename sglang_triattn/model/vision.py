"""Models that take images beside text: which of them compression covers.

An image's tokens lie in the prompt, which no round touches. With M-RoPE (arXiv 2409.12191, section 2.1) an image token
has a position of its own on each of three axes. A text token has the same position on all of them, so its query and key
turn as with plain RoPE, however the axes share the frequencies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COVERED = frozenset(
    {
        "Gemma4ForConditionalGeneration",
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Architectures of which compression covers text at least."""

_TEXT_ALONE = frozenset(
    {
        "Gemma4ForConditionalGeneration",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
    }
)
"""Those among them whose image prompts are not covered. SGLang computes those of all others causally, as one run of
tokens in the request's own row. In Gemma-4, tokens of an image see those behind them; and images are not tested with
layers that keep a state."""

_MEDIA = ("vision_config", "audio_config", "sound_config", "thinker_config")


def is_covered(architectures: list[str] | None) -> bool:
    """Whether compression covers the first of `architectures` and, if it has them, its several axes."""
    return bool(architectures) and architectures[0] in COVERED


def covers_images(architectures: list[str] | None) -> bool:
    """Whether a model may be compressed while its request has images, as far as the first of `architectures` says."""
    return not architectures or architectures[0] not in _TEXT_ALONE


def takes_other_media(config: Mapping[str, Any]) -> bool:
    """Whether a model takes images or sound and is none of those that compression covers.

    Args:
        config: content of its config.json.
    """
    return any(config.get(name) for name in _MEDIA) and not is_covered(config.get("architectures"))
