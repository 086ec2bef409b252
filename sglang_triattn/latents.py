"""Settings for models with latent KV (multi-head latent attention, MLA).

SGLang caches one row of each token and layer for all heads: the latent, which every head reads as its key and as its
value, and behind it one rotated key. Each tensor-parallel rank holds a copy, and keeps of it what its own heads choose.
"""

from __future__ import annotations

import dataclasses

from sglang_triattn.config import VALUE_SHARE, Config, flag
from sglang_triattn.errors import TriAttentionError


def for_latents(config: Config) -> Config:
    """The settings of rounds for a model with latent KV: no token is chosen by its values.

    What a head reads as a value is a projection of the latent, and what lengths of latents say about it has not been
    measured. A share that is the default of other models counts as not given.

    Raises:
        TriAttentionError: another share of tokens is to be chosen by their values.
    """
    if config.value_share not in (0, VALUE_SHARE):
        raise TriAttentionError(
            f"{flag('value_share')} is {config.value_share}, but this model has latent KV, which holds no values apart "
            f"from its keys: leave {flag('value_share')} out, or set it to 0."
        )
    return dataclasses.replace(config, value_share=0.0)
