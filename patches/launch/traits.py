"""Traits of a model as SGLang has read it: transformers completes what a config.json leaves out.

SGLang part: `ModelConfig` (sglang/srt/configs/model_config.py). What only the loaded model shows (its rotary embedding,
its KV pool) is checked later, in `patches/model/inspect.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_triattn.compatibility.traits import PLAIN, Traits, rope_limit
from sglang_triattn.model.families import Family, family_of, is_unknown
from sglang_triattn.model.kinds import served_window

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def traits_of(model: ModelConfig) -> Traits:
    """The traits of a model; SGLang checks its heads, and takes default draft numbers into its settings."""
    family = family_of(model.hf_config.architectures)
    uncovered = _uncovered(model, family)
    # What an uncovered model's file lacks is no reason of its own.
    window = 0 if uncovered else _window_of(model)
    return Traits(
        name=named(model),
        architecture=(model.hf_config.architectures or [""])[0],
        uncovered=uncovered,
        window=window,
        window_pool=bool(model.is_hybrid_swa),
        latent=_has_latents(model),
        linear_states=_has_linear_states(model),
        state_drafts=family.state_drafts,
        layered_drafts=family.layered_drafts,
        assistants=family.assistants,
        images=bool(model.is_multimodal or model.model_is_mrope),
        image_prompts=family.images != "text",
        image_drafts=family.image_drafts,
        context=model.context_len,
        rope_limit=rope_limit(model.hf_text_config.to_dict()),
    )


def named(model: ModelConfig) -> str:
    """Path and architecture of a ModelConfig, for messages."""
    return f"{model.model_path} ({', '.join(model.hf_config.architectures or ['unknown'])})"


def _uncovered(model: ModelConfig, family: Family) -> dict[str, str]:
    """As `Traits.uncovered`."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    latent = _has_latents(model)
    states = _has_linear_states(model) or model.attention_arch == AttentionArch.SSM
    marks = {
        "does_not_generate": not model.is_generation,
        "encoder_decoder": model.is_encoder_decoder,
        "other_media": model.is_multimodal and family.images is None,
        "indexed": is_deepseek_dsa(model.hf_text_config),
        "linear_states": states and not family.linear_states,
        "latent": latent and not family.latent,
        "window_pool": model.is_hybrid_swa and not family.pool_covered,
        "chunks": model.attention_chunk_size or model.is_local_attention_model,
        "row_length": model.use_ngram_embedding or model.use_engram,
        "widths": model.head_dim != model.v_head_dim and not latent and not family.asymmetric,
        "axes": model.model_is_mrope and family.images is None,
        "unknown": is_unknown(model.hf_config.architectures),
    }
    return {mark: PLAIN for mark, holds in marks.items() if holds}


def _window_of(model: ModelConfig) -> int:
    return served_window({**model.hf_text_config.to_dict(), "architectures": model.hf_config.architectures})


def _has_latents(model: ModelConfig) -> bool:
    """Whether SGLang keeps latents in place of keys and values (MLA)."""
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch == AttentionArch.MLA


def _has_linear_states(model: ModelConfig) -> bool:
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None
