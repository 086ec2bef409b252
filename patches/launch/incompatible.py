"""Refusals of settings and models at launch, each with one sentence.

SGLang parts: the resolved settings (sglang/srt/arg_groups/fields/*), the model configuration, the environment. The
model's config.json is checked earlier, in `model_config`; what only the loaded model shows (its rotary embedding, its
KV pool) is checked later, in `patches/model/inspect.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.launch_settings import (
    BESIDE_IMAGES,
    BESIDE_LATENTS,
    BESIDE_MEASURING,
    BESIDE_PREFILL_ELSEWHERE,
    BESIDE_STAGES,
    BESIDE_STATES,
    BESIDE_WINDOW_POOL,
    ENVIRONMENT,
    IMAGES_UNTRIED,
    MEASURE,
    SETTINGS,
    STATES_UNTRIED,
    WINDOWS_UNTRIED,
    Refusal,
    beside_drafts,
    refused_decode_server,
    refused_drafts,
)
from sglang_triattn.model.kinds import served_window
from sglang_triattn.model.support import (
    INDEXED,
    LATENT_UNCOVERED,
    has_covered_latents,
    has_covered_pool,
    has_covered_states,
    has_covered_widths,
    refused_model,
)
from sglang_triattn.model.vision import is_covered

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig


def check_settings(settings: object) -> None:
    """Raises TriAttentionError for the first setting that compression cannot work with.

    Args:
        settings: SGLang's resolved settings (`resolving_view` of a ServerArgs record).
    """
    from sglang.srt.environ import envs

    for refusal in SETTINGS:
        try:
            value = getattr(settings, refusal.field)
        except AttributeError:
            raise TriAttentionError(
                f"This SGLang has no setting {refusal.field}, which sglang-triattn must check: reinstall the SGLang "
                "version that it requires."
            ) from None
        if refusal.applies(value):
            raise TriAttentionError(refusal.message(value))
    for name, reason in ENVIRONMENT.items():
        if getattr(envs, name).get():
            raise TriAttentionError(
                f"The environment variable {name} does not work with --enable-triattention, because {reason}: unset it."
            )


def check_model(model: ModelConfig) -> None:
    """Raises TriAttentionError for a model whose attention compression does not cover.

    Args:
        model: SGLang's ModelConfig.
    """
    reason = unsupported(model)
    if reason is not None:
        raise refused_model(named(model), reason)


def check_window_pool(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting that does not go with window layers that have a KV pool of their own."""
    if model.is_hybrid_swa:
        _check_beside(settings, BESIDE_WINDOW_POOL)


def check_latents(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting that does not go with latent KV."""
    if has_latents(model):
        _check_beside(settings, BESIDE_LATENTS)


def check_states(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting that does not go with layers that keep a state instead of KV."""
    if has_states(model):
        _check_beside(settings, BESIDE_STATES)


def check_stages(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting or a model that does not go with several pipeline stages."""
    if settings.pp_size > 1:
        _check_beside(settings, BESIDE_STAGES)
    if model.is_multimodal:
        _check_beside(settings, BESIDE_IMAGES)


def check_measuring(settings: Any, config: Config) -> None:
    """Raises TriAttentionError for a setting with which a running server cannot measure."""
    if config.stats_after_update == "measure":
        for refusal in BESIDE_MEASURING:
            value = getattr(settings, refusal.field)
            if refusal.applies(value):
                raise TriAttentionError(refusal.message(value, MEASURE))


def check_decode_server(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting or a model that does not go with a prefill on another server."""
    mode = settings.disaggregation_mode
    if mode != "decode":
        return
    beside = f"--disaggregation-mode {mode}"
    for refusal in BESIDE_PREFILL_ELSEWHERE:
        value = getattr(settings, refusal.field)
        if refusal.applies(value):
            raise TriAttentionError(refusal.message(value, beside))
    if model.is_hybrid_swa or model.is_multimodal or has_states(model):
        raise refused_decode_server(named(model))


def _check_beside(settings: Any, refusals: Sequence[Refusal]) -> None:
    for refusal in refusals:
        value = getattr(settings, refusal.field)
        if refusal.applies(value):
            raise TriAttentionError(refusal.message(value))


def check_speculation(settings: Any, model: ModelConfig) -> None:
    """Raises TriAttentionError for a setting, or a model, that does not go with speculative decoding."""
    algorithm = settings.speculative_algorithm
    if algorithm is None:
        return
    for refusal in beside_drafts(algorithm):
        value = getattr(settings, refusal.field)
        if refusal.applies(value):
            raise TriAttentionError(refusal.message(value, f"--speculative-algorithm {algorithm}"))
    if model.is_hybrid_swa or window_of(model):
        raise refused_drafts(algorithm, named(model), WINDOWS_UNTRIED)
    if has_states(model):
        raise refused_drafts(algorithm, named(model), STATES_UNTRIED)
    if model.is_multimodal or model.model_is_mrope:
        raise refused_drafts(algorithm, named(model), IMAGES_UNTRIED)


def window_of(model: ModelConfig) -> int:
    """Most tokens that a query of a model's window layers sees; 0 without such layers."""
    # transformers completes what a config.json may leave out: which layers have the window.
    return served_window({**model.hf_text_config.to_dict(), "architectures": model.hf_config.architectures})


def has_latents(model: ModelConfig) -> bool:
    """Whether SGLang keeps latents in place of keys and values (MLA)."""
    from sglang.srt.configs.model_config import AttentionArch

    return model.attention_arch == AttentionArch.MLA


def has_states(model: ModelConfig) -> bool:
    """Whether some layers keep a state instead of KV."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    return mambaish_config(model) is not None


def named(model: ModelConfig) -> str:
    """Path and architecture of a ModelConfig, for messages."""
    return f"{model.model_path} ({', '.join(model.hf_config.architectures or ['unknown'])})"


def unsupported(model: ModelConfig) -> str | None:
    """Why compression does not cover a ModelConfig's attention, to complete "because ...", or None if it does."""
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    covered = is_covered(model.hf_config.architectures)
    reasons = (
        (not model.is_generation, "it does not generate text"),
        (is_deepseek_dsa(model.hf_text_config), INDEXED),
        (has_latents(model) and not has_covered_latents(model.hf_config.architectures), LATENT_UNCOVERED),
        (model.attention_arch == AttentionArch.SSM, "it is a state-space model without attention"),
        (
            has_states(model) and not has_covered_states(model.hf_config.architectures),
            "some of its layers are state-space or linear-attention layers",
        ),
        (
            model.is_hybrid_swa and not has_covered_pool(model.hf_config.architectures),
            f"some of its layers attend to a sliding window of {model.sliding_window_size} tokens",
        ),
        (bool(model.attention_chunk_size), "its attention is local to chunks"),
        (model.is_local_attention_model, "its attention is local to chunks"),
        (model.is_encoder_decoder, "it is an encoder-decoder model"),
        (
            model.is_multimodal and not covered,
            "it takes images or sound, and is none of the models whose images are covered",
        ),
        (model.model_is_mrope and not covered, "its rotary embedding has several position axes"),
        (
            model.use_ngram_embedding or model.use_engram,
            "its embeddings look up the tokens before by the length of the row, which a round changes",
        ),
        (
            model.head_dim != model.v_head_dim
            and not has_latents(model)
            and not has_covered_widths(model.hf_config.architectures),
            "its keys and values have different widths",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)
