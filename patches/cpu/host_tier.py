"""SGLang's tier of KV in host memory (HiCache) on plain CPUs: ordinary memory, copied by torch.

SGLang parts: `HostKVCache` (sglang/srt/mem_cache/pool_host/base.py), which pins its memory for a GPU, and the copies of
the io backend `direct` (`mha.py`, `mla.py` and `mamba.py` there), which come from `sgl_kernel` and exist only for GPUs.
Everything else in HiCache runs unchanged. On a CPU the tier saves nothing, but it can be tried and tested.

Each layer of a pool is `[num_slots, ...]`: keys or values of KV heads, latents, or a state, one of which counts as a
token in a page of its own. On the host, slots lie either the same way (layout layer_first) or as `[pages, layers,
page_size, ...]` (page_first_direct). Indices are int64 tokens and come in whole pages, in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from sglang.srt.mem_cache.pool_host.base import HostKVCache

IO_BACKEND = "direct"


def install() -> None:
    """Gives SGLang's host pools in this process what they lack without a GPU."""
    from sglang.srt.mem_cache.pool_host import base, mamba, mha, mla

    # SGLang leaves 10 GiB to the system, which is more than a small machine has.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    for pool in (base.HostKVCache, mamba.MambaPoolHost):
        pool.__init__ = _build_unpinned(pool.__init__)
    for pools in (mha, mla, mamba):
        # Without a GPU the modules lack these names.
        vars(pools).update(
            transfer_kv_direct=copy_layers,
            transfer_kv_per_layer_direct_pf_lf=load_layer,
            transfer_kv_all_layer_direct_lf_pf=save_layers,
        )


def _build_unpinned(original: Callable) -> Callable:
    """A host pool's `__init__` without pinned memory, which needs a GPU's driver."""

    @functools.wraps(original)
    def build(pool: HostKVCache, *places: object, **settings: object) -> None:
        original(pool, *places, **{**settings, "pin_memory": False})

    return build


def copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies in either direction between buffers that are both `[slots, ...]`."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_layer(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """Copies one layer from host buffers of whole pages (K and V, or one) to that layer's buffers in the pool."""
    pages = src_indices[::page_size] // page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[pages, layer_id].flatten(0, 1)


def save_layers(
    src_ptrs: Sequence[torch.Tensor],
    dst_ptrs: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies all layers of a pool (all of K, then all of V, or one kind) to host buffers of whole pages (K, V)."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, source in enumerate(src_ptrs):
        target = dst_ptrs[index // layers]
        target[pages, index % layers] = source[src_indices].unflatten(0, (-1, page_size))
