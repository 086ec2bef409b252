"""The fields of a config.json that describe the language model, with the types that the readers rely on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_triattn.errors import TriAttentionError, quoted

Fields = Mapping[str, Any]

_FLOAT = (int, float)
# Field -> (types of its value, types of the entries if it is a list, the same in words). None is allowed everywhere.
_TYPES: dict[str, tuple[tuple[type, ...], tuple[type, ...] | None, str]] = {
    **dict.fromkeys(
        (
            *(
                "text_config",
                "llm_config",
                "language_config",
                "thinker_config",
                "rope_scaling",
                "rope_parameters",
                "linear_attn_config",
                "attention_other_setting",
                "attn_config",
            ),
            "per_layer_config",
        ),
        ((dict,), None, "an object"),
    ),
    **dict.fromkeys(
        ("architectures", "layer_types", "layers_block_type", "mixer_types"), ((list,), (str,), "a list of names")
    ),
    **dict.fromkeys(
        (
            *("hybrid_layer_pattern", "no_rope_layers", "full_attn_layers", "attn_type_list"),
            "num_attention_heads_per_layer",
        ),
        ((list,), (int,), "a list of whole numbers"),
    ),
    **dict.fromkeys(("layer_rope_theta", "partial_rotary_factors"), ((list,), _FLOAT, "a list of numbers")),
    "rope_theta": ((*_FLOAT, list), _FLOAT, "a number, or a list of numbers"),
    **dict.fromkeys(
        ("partial_rotary_factor", "rotary_pct", "factor", "attn_temperature_len"), (_FLOAT, None, "a number")
    ),
    **dict.fromkeys(
        ("sliding_window", "sliding_window_size", "rotary_dim", "kv_lora_rank", "qk_rope_head_dim", "v_head_dim"),
        ((int,), None, "a whole number"),
    ),
    **dict.fromkeys(
        ("full_attention_interval", "layer_group_size", "no_rope_layer_interval", "num_kv_shared_layers"),
        ((int,), None, "a whole number"),
    ),
    "sliding_window_pattern": ((int, str), None, "a whole number or letters"),
    "hybrid_override_pattern": ((str,), None, "letters"),
    "block_configs": ((list,), (dict,), "a list of objects"),
}


def text_fields(config: Fields) -> dict[str, Any]:
    """The text model's fields: those in its own object, else the outer ones; `architectures` is always the outer one.

    Where a file has the text model: `get_hf_text_config` in sglang/srt/utils/hf_transformers/common.py.

    Args:
        config: content of a config.json.

    Raises:
        TriAttentionError: a field has another type than the readers rely on.
    """
    _check(config)
    thinker = config.get("thinker_config") or {}
    places = (
        thinker.get("text_config"),
        thinker,
        *(config.get(f"{name}_config") for name in ("llm", "language", "text")),
    )
    return {**config, **next(filter(None, places), {}), "architectures": config.get("architectures")}


def architecture(fields: Fields) -> str:
    return (fields.get("architectures") or [""])[0]


def count(fields: Fields, *names: str, least: int = 1) -> int:
    """The value of the first of these fields that is there.

    Raises:
        TriAttentionError: none is, or it is not a whole number of at least `least`.
    """
    name = next((name for name in names if fields.get(name) is not None), names[0])
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        has = f"no {name}" if value is None else f"{name} {quoted(value)}"
        raise TriAttentionError(
            f"The config.json of this {fields.get('model_type') or 'unknown'} model has {has}, but a whole number of "
            f"at least {least} was expected: give the file of a decoder-only language model."
        )
    return value


def _shown(value: object) -> str:
    return quoted(value) if value is None or isinstance(value, bool) else quoted(str(value)[:60])


def _check(fields: Fields) -> None:
    for name, value in fields.items():
        types, entries, words = _TYPES.get(name, ((object,), None, ""))
        known = value is None or isinstance(value, types)
        # To Python, true is a number.
        known &= not (isinstance(value, bool) and bool not in types and object not in types)
        if known and isinstance(value, list) and entries is not None:
            known = all(isinstance(entry, entries) for entry in value)
        if not known:
            raise TriAttentionError(
                f"The config.json has {name} {_shown(value)}, but {words} was expected: give the config.json of a "
                "Hugging Face model."
            )
        for inner in value if isinstance(value, list) else (value,):
            if name in _TYPES and isinstance(inner, dict):
                _check(inner)
