"""Which layers of a transformers model are scored, and which of them have RoPE, from its configuration."""

from __future__ import annotations

from typing import Any

FULL = "full_attention"

# Models with windows that rotate in window layers alone: see `is_sliding` or `sliding_window` in their attention.
_FULL_WITHOUT_ROPE = ("cohere2", "exaone4", "exaone_moe")
# Models that leave it to their states where a token stands.
_WITHOUT_ROPE = ("nemotron_h",)


def scored_layers(config: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Numbers of the layers that are scored, and for each of them whether RoPE turns its queries and keys.

    All layers are scored if they are of one kind. Otherwise those with full attention are, because the others read only
    what their window, their chunk or their state holds. Layers that read the KV of another are not scored themselves.

    Args:
        config: a transformers configuration of a text model, as transformers completes it: `layer_types` and
            `no_rope_layers` have an entry for each layer, where the model knows these.
    """
    kinds = _kinds(config)
    # Despite its name, the first has a 1 where there is RoPE, and the other a base.
    given = getattr(config, "no_rope_layers", None) or getattr(config, "layer_rope_theta", None)
    uses_rope = given or [1] * len(kinds)
    only_full = len(set(kinds)) > 1
    owners = kinds[: _first_sharing(config)]
    layers = tuple(number for number, kind in enumerate(owners) if kind == FULL or not only_full)
    still = config.model_type in _FULL_WITHOUT_ROPE and config.sliding_window is not None
    if never_rotates(config):
        return layers, (False,) * len(layers)
    return layers, tuple(bool(uses_rope[layer]) and not (still and kinds[layer] == FULL) for layer in layers)


def never_rotates(config: Any) -> bool:
    """Whether no layer has a rotary embedding, scored or not."""
    return config.model_type in _WITHOUT_ROPE or getattr(config, "position_embedding_type", None) in ("nope", "none")


def readers(config: Any) -> dict[int, int]:
    """For each layer that reads the KV of a scored one, the number of that one; a scored layer reads its own.

    Args:
        config: as for `scored_layers`.
    """
    kinds, scored = _kinds(config), scored_layers(config)[0]
    found = {number: number for number in scored}
    for number in range(_first_sharing(config), len(kinds)):
        # The last layer of its kind that has KV of its own.
        source = max(owner for owner in range(_first_sharing(config)) if kinds[owner] == kinds[number])
        if source in scored:
            found[number] = source
    return found


def kv_heads(config: Any) -> int:
    """KV heads of the scored layers: one for latent KV, although the configuration counts its expanded heads."""
    if getattr(config, "kv_lora_rank", None):
        return 1
    if getattr(config, "is_heterogeneous", False):
        config = config.per_layer_config[scored_layers(config)[0][0]]
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def head_width(config: Any) -> int:
    """Dims of a query of a scored layer."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _kinds(config: Any) -> list[str]:
    return getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers


def _first_sharing(config: Any) -> int:
    """The first layer from which on each reads the KV of another; the number of layers if none does."""
    return len(_kinds(config)) - (getattr(config, "num_kv_shared_layers", None) or 0)
