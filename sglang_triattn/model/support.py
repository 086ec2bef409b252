"""Reasons not to compress a model that show in its config.json, before any weight is read.

What only the loaded model shows is checked in `patches/model/inspect.py`. How SGLang serves an architecture is taken
from SGLang 0.5.23, sglang/srt/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fields import Fields, architecture, text_fields
from sglang_triattn.model.kinds import (
    CHUNK,
    FULL,
    KINDS,
    LINEAR,
    WINDOW,
    block_attention,
    has_window_pool,
    layer_kinds,
)
from sglang_triattn.model.vision import COVERED, takes_other_media

_STATE_SPACE = (
    *("ssm_", "mamba_", "linear_num_", "linear_attn", "lru_width", "conv_L_cache"),
    *("hybrid_override_pattern", "layers_block_type", "mamba2_"),
)

# SGLang reads the widths of keys and of values of these apart, and so do its pools.
_ASYMMETRIC = ("MiMoV2FlashForCausalLM", "MiMoV2ForCausalLM")

# Of the models whose window layers have a KV pool of their own, those that rounds are known to leave whole.
_POOLS_COVERED = ("GptOssForCausalLM", "Step3p5ForCausalLM", "Gemma4ForConditionalGeneration", *_ASYMMETRIC)

# Layers of these may read the KV of layers before them, which are scored by the queries of all that read them; and RoPE
# may leave dims alone between those that it turns.
_GEMMA = ("Gemma4ForConditionalGeneration",)

# SGLang serves latent KV in more models, but these alone are known to turn and absorb their queries in this way.
_LATENT = ("DeepseekV3ForCausalLM", "Glm4MoeLiteForCausalLM")

# Layers of these that keep a state instead of KV read no row, so a round leaves them alone.
_STATES = (
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Lfm2ForCausalLM"),
    *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
    *("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM", "NemotronHForCausalLM"),
)
# Of these, those whose attention may have no rotary embedding in any layer: states tell them where a token stands.
_MAY_LACK_ROTATION = ("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM")

_ROPE_KINDS = ("default", "linear", "llama3", "yarn", "mrope")
_LOOPS = "it runs its layers several times, with KV of its own each time"
_DIFFUSION = "it is a diffusion model, which rewrites its tokens"
_NO_ROPE = "its attention has no rotary embedding"
_OTHER_DIMS = "it rotates other dims of a head than the leading ones"
INDEXED = "its layers attend to the tokens that an indexer selects (DeepSeek sparse attention)"
LATENT_UNCOVERED = "it has multi-head latent attention (MLA), and is none of the models for which that is covered"


def _always(_: Fields) -> bool:
    return True


# Reasons that no general field shows. Each condition takes the file's content.
_ARCHITECTURES: dict[str, tuple[Callable[[Fields], Any], str]] = {
    **dict.fromkeys(
        ("HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM"),
        (lambda config: config.get("use_qk_norm"), "it normalises queries and keys after their rotation"),
    ),
    **dict.fromkeys(("GPT2LMHeadModel", "GPTBigCodeForCausalLM", "OPTForCausalLM"), (_always, _NO_ROPE)),
    # The 7B model uses RoPE, the larger ones do not.
    "BaichuanForCausalLM": (lambda config: config.get("hidden_size") != 4096, "it has ALiBi in place of rotation"),
    **dict.fromkeys(("HrmTextForCausalLM", "NanbeigeForCausalLM", "IQuestLoopCoderForCausalLM"), (_always, _LOOPS)),
    **dict.fromkeys(("LLaDA2MoeModelLM", "SDARForCausalLM", "SDARMoeForCausalLM"), (_always, _DIFFUSION)),
    **dict.fromkeys(
        ("XllmForCausalLM", "K2HorizonForCausalLM"),
        (lambda config: config.get("rope_head_dim") not in (None, config.get("head_dim")), _OTHER_DIMS),
    ),
    "MiniMaxM3SparseForCausalLM": (_always, "its layers attend to selected blocks of tokens"),
    "ZayaForCausalLM": (_always, "its attention keeps a state beside the KV cache"),
    "JetNemotronForCausalLM": (_always, "it has linear-attention layers"),
}


def has_covered_pool(architectures: list[str] | None) -> bool:
    """Whether rounds are known to leave whole the pool that window layers of the first of `architectures` have."""
    return bool(architectures) and architectures[0] in _POOLS_COVERED


def has_covered_widths(architectures: list[str] | None) -> bool:
    """Whether keys and values of the first of `architectures` may have different widths."""
    return bool(architectures) and architectures[0] in _ASYMMETRIC


def has_covered_latents(architectures: list[str] | None) -> bool:
    """Whether the latent KV of the first of `architectures` can be scored."""
    return bool(architectures) and architectures[0] in _LATENT


def has_covered_states(architectures: list[str] | None) -> bool:
    """Whether the first of `architectures` may have layers that keep a state instead of KV, or beside it."""
    return bool(architectures) and architectures[0] in _STATES


def may_lack_rotation(architectures: list[str] | None) -> bool:
    """Whether no layer of the first of `architectures` needs to have a rotary embedding."""
    return bool(architectures) and architectures[0] in _MAY_LACK_ROTATION


def unsupported(config: Fields) -> str | None:
    """Why compression does not cover a model, to complete "because ...", or None if its config.json shows no reason.

    Args:
        config: content of the file; fields in `text_config` take precedence over those beside it.

    Raises:
        TriAttentionError: a field has a type that it cannot have.
    """
    fields = text_fields(config)
    try:
        kinds = layer_kinds(fields)
    except TriAttentionError:
        kinds = []
    return _by_architecture(fields) or _by_attention(fields, kinds) or _by_position(fields, kinds)


def refused_model(name: str, reason: str) -> TriAttentionError:
    return TriAttentionError(
        f"The model {name} does not work with --enable-triattention, because {reason}: serve a decoder-only model with "
        "ordinary multi-head or grouped-query attention, or start without --enable-triattention."
    )


def _by_architecture(fields: Fields) -> str | None:
    found = _ARCHITECTURES.get(architecture(fields))
    return found[1] if found is not None and found[0](fields) else None


def _by_attention(fields: Fields, kinds: list[str]) -> str | None:
    others = [kind for kind in kinds if kind not in KINDS]
    state_space = any(key.startswith(_STATE_SPACE) and value for key, value in fields.items())
    state_space &= not fields.get("layer_types") or set(kinds) > {FULL}
    state_space |= LINEAR in kinds or any(word in str(fields.get("model_type")) for word in ("mamba", "rwkv"))
    state_space &= not has_covered_states([architecture(fields)])
    window = fields.get("sliding_window")
    groups = {
        str(block_attention(block).get("n_heads_in_group"))
        for block, kind in zip(fields.get("block_configs") or (), kinds, strict=False)
        if kind == FULL
    }
    reasons = (
        (fields.get("is_encoder_decoder"), "it is an encoder-decoder model"),
        (
            takes_other_media(fields),
            "it takes images or sound, and is none of the models whose images are covered",
        ),
        (fields.get("index_topk"), INDEXED),
        (state_space, "it is a state-space model, or has state-space or linear-attention layers"),
        (fields.get("kv_lora_rank") and not has_covered_latents([architecture(fields)]), LATENT_UNCOVERED),
        (others, f"some of its layers are of the type {min(others, default='')}"),
        (
            WINDOW in kinds and has_window_pool(fields) and not has_covered_pool([architecture(fields)]),
            "some of its layers attend to a sliding window, and have a KV pool of their own",
        ),
        (WINDOW in kinds and FULL not in kinds, f"it attends to a sliding window of {window} tokens"),
        (CHUNK in kinds or fields.get("attention_chunk_size"), "its attention is local to chunks"),
        (fields.get("dual_chunk_attention_config"), "its attention is local to chunks"),
        (
            fields.get("sparse_config") and "minicpm4" in (fields.get("mixer_types") or ()),
            "its layers attend to selected blocks of tokens",
        ),
        (len(groups) > 1, "its layers differ from one another"),
        (
            fields.get("use_cla") or (fields.get("num_kv_shared_layers") and architecture(fields) not in _GEMMA),
            "its layers share KV with one another",
        ),
        (fields.get("use_bidirectional_attention") == "all", "its tokens attend to those behind them"),
        (
            (fields.get("attn_temperature_len") or 0) > 0 or fields.get("attn_temperature_tuning"),
            "it scales its attention by length",
        ),
        (
            fields.get("use_ngram_embedding") or fields.get("ngram_vocab_size_ratio"),
            "its embeddings look up the tokens before by the length of the row, which a round changes",
        ),
        (
            fields.get("v_head_dim") not in (None, 0, fields.get("head_dim"))
            and not fields.get("kv_lora_rank")
            and not has_covered_widths([architecture(fields)]),
            "its keys and values have different widths",
        ),
    )
    return _first(reasons)


def _by_position(fields: Fields, kinds: list[str]) -> str | None:
    embedding = fields.get("position_embedding_type")
    rope = {**(fields.get("rope_scaling") or {}), **(fields.get("rope_parameters") or {})}
    # Only layers with full attention are scored, so only their rotation counts.
    own = rope.get("full_attention")
    rope = own if isinstance(own, Mapping) else rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    unlike = any(isinstance(value, Mapping) for value in rope.values())
    for name in ("rope_theta", "layer_rope_theta", "partial_rotary_factors"):
        values = fields.get(name)
        if isinstance(values, list):
            unlike |= len({value for value, kind in zip(values, kinds, strict=False) if kind == FULL}) > 1
    axes = "mrope_section" in rope or kind == "mrope"
    reasons = (
        (fields.get("alibi") or fields.get("use_alibi") or embedding == "alibi", "it has ALiBi in place of rotation"),
        (embedding in ("absolute", "learned_absolute"), _NO_ROPE),
        (embedding in ("nope", "none") and not may_lack_rotation([architecture(fields)]), _NO_ROPE),
        (fields.get("attn_use_rope") is False, _NO_ROPE),
        (unlike, "its layers rotate in different ways"),
        (
            axes and architecture(fields) not in COVERED,
            "its rotary embedding has several position axes",
        ),
        (
            kind not in (*_ROPE_KINDS, *(("proportional",) if architecture(fields) in _GEMMA else ()))
            or rope.get("use_fope"),
            f"its rotary embedding is of the kind {'fope' if rope.get('use_fope') else kind}, which cannot be scored "
            "yet",
        ),
    )
    return _first(reasons)


def _first(reasons: tuple[tuple[Any, str], ...]) -> str | None:
    return next((reason for applies, reason in reasons if applies), None)
