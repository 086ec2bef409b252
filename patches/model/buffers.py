"""Which tensors hold the K/V of SGLang's KV pools, and what moves it.

SGLang parts: `MHATokenToKVPool`, whose layers have a buffer of keys and one of values, and `MLATokenToKVPool`, whose
layers have one of latents, read as both (sglang/srt/mem_cache/memory_pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache


def make_mover(
    config: RoundRules, page_size: int, pool: KVCache, layers: Sequence[int], *, kernels: bool | None = None
) -> Mover | None:
    """The Mover for `layers` of SGLang's KV pool `pool`.

    Window layers are not among them: a round moves nothing that they will ever read again. None if rounds move nothing
    at all: slots can be freed one by one, and all heads keep the same tokens.
    """
    if page_size == 1 and selection_named(config.selection).shared:
        return None
    return Mover(*kv_buffers(pool, layers), kernels=kernels)


def kv_buffers(pool: KVCache, layers: Sequence[int]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Key and value buffers of `layers` of SGLang's KV pool, per layer [num_slots, H_kv, head_dim].

    Rows of latents are given as keys, without values.
    """
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    keys = [pool.get_key_buffer(layer) for layer in layers]
    # Where some layers keep a state, that of the others.
    if isinstance(getattr(pool, "full_kv_pool", pool), MLATokenToKVPool):
        return keys, []
    return keys, [pool.get_value_buffer(layer) for layer in layers]
