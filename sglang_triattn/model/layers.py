"""Which layers of a transformers model are scored, and which of them have RoPE, from its configuration."""

from __future__ import annotations

from typing import Any

FULL = "full_attention"

# Models with windows that rotate in window layers alone: see `is_sliding` or `sliding_window` in their attention.
_FULL_WITHOUT_ROPE = ("cohere2", "exaone4", "exaone_moe")


def scored_layers(config: Any) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    """Numbers of the layers that are scored, and for each of them whether RoPE turns its queries and keys.

    All layers are scored if they are of one kind. Otherwise those with full attention are, because the others read only
    what their window, their chunk or their state holds.

    Args:
        config: a transformers configuration of a text model, as transformers completes it: `layer_types` and
            `no_rope_layers` have an entry for each layer, where the model knows these.
    """
    kinds = getattr(config, "layer_types", None) or [FULL] * config.num_hidden_layers
    uses_rope = getattr(config, "no_rope_layers", None) or [1] * len(kinds)  # despite its name, 1 where there is RoPE
    only_full = len(set(kinds)) > 1
    layers = tuple(number for number, kind in enumerate(kinds) if kind == FULL or not only_full)
    still = config.model_type in _FULL_WITHOUT_ROPE and config.sliding_window is not None
    return layers, tuple(bool(uses_rope[layer]) and not (still and kinds[layer] == FULL) for layer in layers)
