"""Which kind of attention each layer of a model has, and which layers RoPE turns, read from config.json alone.

What the file leaves to SGLang's code is in `families`.
"""

from __future__ import annotations

from sglang_triattn.model.families import Family, family_in
from sglang_triattn.model.fields import Fields, count, text_fields

FULL, WINDOW, CHUNK, LATENT, LINEAR, NONE = "full", "window", "chunk", "latent", "linear", "none"
KINDS = (FULL, WINDOW, CHUNK, LATENT, LINEAR, NONE)
"""Kinds of layers: attention to all tokens, to a sliding window, within chunks; latent KV (MLA); a state of fixed size
(linear attention, state space, convolution); no attention."""

_NAMED = {
    **dict.fromkeys(("full_attention", "attention", "global_attention", "minicpm4"), FULL),
    **dict.fromkeys(("sliding_attention", "local_attention"), WINDOW),
    "chunked_attention": CHUNK,
    **dict.fromkeys(("linear_attention", "mamba", "conv", "short_conv", "recurrent", "lightning-attn"), LINEAR),
    **dict.fromkeys(("mlp", "moe"), NONE),
}
_LETTERS = {"*": FULL, "M": LINEAR, "-": NONE, "E": NONE}  # Nemotron-H


def layer_kinds(fields: Fields) -> list[str]:
    """The kind of each layer, or the file's own word for one that is not known.

    Args:
        fields: from `text_fields`.

    Raises:
        TriAttentionError: the number of layers is needed and missing.
    """
    family = family_in(fields)
    if fields.get("hybrid_override_pattern"):
        letters: str = fields["hybrid_override_pattern"]
        return [_LETTERS.get(letter, letter) for letter in letters]
    if fields.get("block_configs"):
        return [NONE if _skips_attention(block) else FULL for block in fields["block_configs"]]
    if fields.get("attn_type_list"):
        return [FULL if softmax else LINEAR for softmax in fields["attn_type_list"]]
    named: list[str] | None = fields.get("layer_types") or fields.get("layers_block_type") or fields.get("mixer_types")
    if named:
        kinds = [_NAMED.get(word, word) for word in named]
    else:
        layers = count_layers(fields)
        kinds = [_kind_by_number(fields, family, number) for number in range(layers)]
    if not family.windows:
        kinds = [FULL if kind == WINDOW else kind for kind in kinds]
    if fields.get("kv_lora_rank"):
        kinds = [LATENT if kind == FULL else kind for kind in kinds]
    return kinds * attentions_per_layer(fields)


def count_layers(fields: Fields) -> int:
    return count(fields, "num_hidden_layers", "num_layers", "n_layer", "n_layers")


def attentions_per_layer(fields: Fields) -> int:
    """Attentions, each with KV of its own, per layer that the file counts."""
    family = family_in(fields)
    loops = count(fields, family.loops) if fields.get(family.loops) is not None else 1
    return family.attentions * loops


def block_attention(block: Fields) -> Fields:
    """The fields of the attention in an entry of `block_configs`."""
    attention = block.get("attention")
    return attention if isinstance(attention, dict) else {}


def _skips_attention(block: Fields) -> bool:
    attention = block_attention(block)
    return bool(attention.get("no_op") or attention.get("replace_with_linear"))


def _kind_by_number(fields: Fields, family: Family, number: int) -> str:
    """The kind of a layer that the file does not name."""
    ordinal = number + 1
    linear = fields.get("linear_attn_config") or {}
    pattern, letters = fields.get("sliding_window_pattern"), fields.get("hybrid_layer_pattern")
    window = fields.get("sliding_window")
    if linear:
        return FULL if ordinal in (linear.get("full_attn_layers") or ()) else LINEAR
    for interval in ("full_attention_interval", "layer_group_size"):
        if fields.get(interval):
            return LINEAR if ordinal % fields[interval] else FULL
    if letters:
        return FULL if number >= len(letters) or not letters[number] else WINDOW
    # transformers has a window where the file has no such field.
    if family.full_every and not pattern and fields.get("sliding_window", True):
        pattern = family.full_every
    if pattern:
        return WINDOW if ordinal % (len(pattern) if isinstance(pattern, str) else pattern) else FULL
    if fields.get("attention_chunk_size"):
        return CHUNK
    # Qwen configs give a window that is unused unless a switch turns it on.
    switch = fields.get("use_sliding_window", not str(fields.get("model_type")).startswith("qwen"))
    return WINDOW if window and switch else FULL


def rotated_layers(fields: Fields, kinds: list[str]) -> list[bool]:
    """For each layer, whether RoPE turns its queries and keys."""
    family, layers = family_in(fields), range(len(kinds))
    if family.rope_in == "none" or fields.get("attn_use_rope") is False:
        return [False for _ in layers]
    if fields.get("position_embedding_type") in ("absolute", "learned_absolute", "nope", "none"):
        return [False for _ in layers]
    if family.rope_in == "windows" and WINDOW in kinds:
        return [kind == WINDOW for kind in kinds]
    bases = fields.get("layer_rope_theta")
    if bases:
        # 0 stands for a layer without RoPE.
        return [number >= len(bases) or bool(bases[number]) for number in layers]
    given, interval = fields.get("no_rope_layers"), fields.get("no_rope_layer_interval")
    if given and family.still_by_number:
        return [number not in given for number in layers]
    if given:
        # Despite its name, a 1 stands for a layer with RoPE.
        return [number >= len(given) or bool(given[number]) for number in layers]
    if interval:
        return [bool((number + 1) % interval) for number in layers]
    return [True for _ in layers]


def has_window_pool(fields: Fields) -> bool:
    """Whether SGLang keeps the KV of a model's window layers, if it has some, in a pool of its own."""
    return family_in(fields).window_pool or bool(fields.get("is_hybrid_swa"))


def served_window(config: Fields) -> int:
    """Most tokens that a query of a window layer sees, of the content of a config.json; 0 without such layers."""
    fields = text_fields(config)
    return window_of(fields) if WINDOW in layer_kinds(fields) else 0


def window_of(fields: Fields) -> int:
    family = family_in(fields)
    return count(fields, family.window_field, "sliding_window", "window_size") + family.window_extra
