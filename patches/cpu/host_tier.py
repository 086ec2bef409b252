"""SGLang's tier of KV in host memory (HiCache) on plain CPUs: ordinary memory, copied by torch.

SGLang parts: `HostKVCache` (sglang/srt/mem_cache/pool_host/base.py), which pins its memory for a GPU, and the copies of
the io backend `direct` (sglang/srt/mem_cache/pool_host/mha.py), which come from `sgl_kernel` and exist only for GPUs.
Everything else in HiCache runs unchanged. On a CPU the tier saves nothing, but it can be tried and tested.

Each layer of the KV pool is `[num_slots, H_kv, head_dim]`. On the host, slots lie either the same way (layout
layer_first) or as `[pages, layers, page_size, H_kv, head_dim]` (page_first_direct). Indices are int64 tokens and come
in whole pages, in order.
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
    from sglang.srt.mem_cache.pool_host import base, mha

    # SGLang leaves 10 GiB to the system, which is more than a small machine has.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    base.HostKVCache.__init__ = _build_unpinned(base.HostKVCache.__init__)
    mha.transfer_kv_direct = copy_layers
    mha.transfer_kv_per_layer_direct_pf_lf = load_layer
    mha.transfer_kv_all_layer_direct_lf_pf = save_layers


def _build_unpinned(original: Callable) -> Callable:
    """`HostKVCache.__init__` without pinned memory, which needs a GPU's driver."""

    @functools.wraps(original)
    def build(pool: HostKVCache, **settings: object) -> None:
        original(pool, **{**settings, "pin_memory": False})

    return build


def copy_layers(
    src_layers: Sequence[torch.Tensor],
    dst_layers: Sequence[torch.Tensor],
    src_indices: torch.Tensor,
    dst_indices: torch.Tensor,
    page_size: int,
) -> None:
    """Copies in either direction between buffers that are both `[slots, H_kv, head_dim]`."""
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
    """Copies one layer from host buffers of whole pages (K, V) to that layer's buffers in the KV pool (K, V)."""
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
    """Copies all layers of the KV pool (all of K, then all of V) to host buffers of whole pages (K, V)."""
    pages = dst_indices[::page_size] // page_size
    layers = len(src_ptrs) // len(dst_ptrs)
    for index, source in enumerate(src_ptrs):
        target = dst_ptrs[index // layers]
        target[pages, index % layers] = source[src_indices].unflatten(0, (-1, page_size))
