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
        "Glm4vForConditionalGeneration",
        "Glm4vMoeForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoeForConditionalGeneration",
    }
)
"""Architectures whose image prompts SGLang computes causally, as one run of tokens in the request's own row."""

_MEDIA = ("vision_config", "audio_config", "sound_config", "thinker_config")


def is_covered(architectures: list[str] | None) -> bool:
    """Whether compression covers the first of `architectures`, with its images and, if it has them, several axes."""
    return bool(architectures) and architectures[0] in COVERED


def takes_other_media(config: Mapping[str, Any]) -> bool:
    """Whether a model takes images or sound in a way that compression does not cover.

    Args:
        config: content of its config.json.
    """
    return any(config.get(name) for name in _MEDIA) and not is_covered(config.get("architectures"))
