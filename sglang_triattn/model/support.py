"""Reasons not to compress a model that show in its config.json, before any weight is read.

What only the loaded model shows is checked in `patches/model/inspect.py`. How SGLang serves an architecture is taken
from SGLang 0.5.23, sglang/srt/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sglang_triattn.model.vision import is_covered, takes_other_media

Config = Mapping[str, Any]

_STATE_SPACE = (
    *("ssm_", "mamba_", "linear_num_", "linear_attn", "lru_width", "conv_L_cache"),
    *("hybrid_override_pattern", "layers_block_type", "attn_type_list", "mamba2_"),
)
_FULL = ("full_attention", "attention")

# SGLang serves these with full attention in every layer, whatever window the file names.
_WINDOW_NOT_SERVED = (
    *("LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Phi3ForCausalLM", "PhiMoEForCausalLM"),
    "Ministral3ForCausalLM",
    *("Qwen2ForCausalLM", "Qwen2MoeForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Starcoder2ForCausalLM"),
)

# SGLang keeps the KV of their window layers beside that of the others, slot by slot.
_WINDOWS_BESIDE_OTHERS = (
    *("Gemma2ForCausalLM", "Gemma3ForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "Exaone4ForCausalLM"),
    "Cohere2ForCausalLM",
)
# There a query sees one token more than the model's own code lets it see.
_ONE_MORE = ("Cohere2ForCausalLM",)

_LOOPS = "it runs its layers several times, with KV of its own each time"
_DIFFUSION = "it is a diffusion model, which rewrites its tokens"
_NO_ROPE = "its attention has no rotary embedding"
_OTHER_DIMS = "it rotates other dims of a head than the leading ones"


def _always(_: Config) -> bool:
    return True


# Reasons that no general field shows. Each condition takes the file's content.
_ARCHITECTURES: dict[str, tuple[Callable[[Config], Any], str]] = {
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


def unsupported(config: Config) -> str | None:
    """Why compression does not cover a model, to complete "because ...", or None if its config.json shows no reason.

    Args:
        config: content of the file; fields in `text_config` take precedence over those beside it.
    """
    merged = {**config, **(config.get("text_config") or {}), "architectures": config.get("architectures")}
    return _by_architecture(merged) or _by_attention(merged) or _by_position(merged)


def served_window(config: Config) -> int:
    """Most tokens that a query of a window layer sees where SGLang serves window layers beside others; else 0."""
    kinds = config.get("layer_types") or ()
    if _architecture(config) not in _WINDOWS_BESIDE_OTHERS or "sliding_attention" not in kinds:
        return 0
    window = config.get("sliding_window")
    return window + (_architecture(config) in _ONE_MORE) if window else 0


def _architecture(config: Config) -> str:
    return (config.get("architectures") or [""])[0]


def _by_architecture(config: Config) -> str | None:
    found = _ARCHITECTURES.get(_architecture(config))
    return found[1] if found is not None and found[0](config) else None


def _by_attention(config: Config) -> str | None:
    kinds = {kind for kind in config.get("layer_types") or () if kind not in _FULL}
    window = None
    # Qwen configs give a window that is unused unless a switch turns it on.
    switch = config.get("use_sliding_window", not str(config.get("model_type")).startswith("qwen"))
    if _architecture(config) in (*_WINDOW_NOT_SERVED, *_WINDOWS_BESIDE_OTHERS):
        kinds.discard("sliding_attention")
    elif switch and not config.get("layer_types"):
        window = config.get("sliding_window")
    state_space = any(key.startswith(_STATE_SPACE) and value for key, value in config.items())
    state_space &= bool(kinds) or not config.get("layer_types")
    state_space |= any(word in str(config.get("model_type")) for word in ("mamba", "rwkv"))
    state_space |= "lightning-attn" in (config.get("mixer_types") or ())
    reasons = (
        (config.get("is_encoder_decoder"), "it is an encoder-decoder model"),
        (takes_other_media(config), "it takes images or sound, and is none of the models whose images are covered"),
        (config.get("kv_lora_rank"), "its attention is multi-head latent attention (MLA)"),
        (state_space, "it is a state-space model, or has state-space or linear-attention layers"),
        ("sliding_attention" in kinds, "some of its layers attend to a sliding window"),
        (kinds, f"some of its layers are of the type {min(kinds, default='')}"),
        (window, f"it attends to a sliding window of {window} tokens"),
        (config.get("attention_chunk_size"), "its attention is local to chunks"),
        (config.get("dual_chunk_attention_config"), "its attention is local to chunks"),
        (
            config.get("sparse_config") and "minicpm4" in (config.get("mixer_types") or ()),
            "its layers attend to selected blocks of tokens",
        ),
        (_uneven(config.get("block_configs") or ()), "its layers differ from one another"),
        (config.get("use_cla"), "its layers share KV with one another"),
        ((config.get("attn_temperature_len") or 0) > 0, "it scales its attention by length"),
        (
            config.get("use_ngram_embedding") or config.get("ngram_vocab_size_ratio"),
            "its embeddings look up the tokens before by the length of the row, which a round changes",
        ),
        (
            config.get("v_head_dim") not in (None, 0, config.get("head_dim")),
            "its keys and values have different widths",
        ),
    )
    return _first(reasons)


def _uneven(blocks: Sequence[Config]) -> bool:
    """Whether the layers that have attention differ in it, by the `block_configs` of a Nemotron-NAS model."""
    attention = [block.get("attention") or {} for block in blocks]
    groups = {found.get("n_heads_in_group") for found in attention if not found.get("no_op")}
    return len(groups) > 1 or any(found.get("replace_with_linear") for found in attention)


def _by_position(config: Config) -> str | None:
    embedding = config.get("position_embedding_type")
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    # Where layers rotate by their kind, the loaded model shows whether those that are scored rotate alike.
    by_kind = _architecture(config) in _WINDOWS_BESIDE_OTHERS
    unlike = not by_kind and any(isinstance(value, Mapping) for value in rope.values())
    unlike |= len(set(config.get("layer_rope_theta") or ())) > 1
    axes = ("mrope_section" in rope or kind == "mrope") and not is_covered(config.get("architectures"))
    reasons = (
        (config.get("alibi") or config.get("use_alibi") or embedding == "alibi", "it has ALiBi in place of rotation"),
        (embedding in ("absolute", "learned_absolute", "nope", "none"), _NO_ROPE),
        (config.get("attn_use_rope") is False, _NO_ROPE),
        (unlike, "its layers rotate in different ways"),
        (axes, "its rotary embedding has several position axes"),
        (
            kind not in ("default", "linear", "llama3", "yarn", "mrope") or rope.get("use_fope"),
            f"its rotary embedding is of the kind {'fope' if rope.get('use_fope') else kind}, which cannot be scored "
            "yet",
        ),
    )
    return _first(reasons)


def _first(reasons: tuple[tuple[Any, str], ...]) -> str | None:
    return next((reason for applies, reason in reasons if applies), None)
