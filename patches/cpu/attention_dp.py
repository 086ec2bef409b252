"""Attention data parallelism (--enable-dp-attention) without a GPU: copies by torch, memory that is not pinned.

SGLang parts: `memcpy` (sglang/srt/layers/dp_attention.py) and `ForwardBatch.prepare_mlp_sync_batch`
(sglang/srt/model_executor/forward_batch_info.py), both of which have a path for SGLang's own CPU engine.
"""

from __future__ import annotations


def install() -> None:
    """Takes SGLang's own paths for CPUs, which it chooses by its CPU engine alone."""
    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.layers import dp_attention
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.model_executor import forward_batch_info

    dp_attention.memcpy_func = dp_attention.memcpy_cpu
    forward_batch_info._is_cpu = True
    GroupCoordinator.all_gather_into_tensor = GroupCoordinator._all_gather_into_tensor
    GroupCoordinator.all_to_all_single = GroupCoordinator._all_to_all_single
    # It also returns its output, which is not used.
    GroupCoordinator.reduce_scatter_tensor = GroupCoordinator._reduce_scatter_tensor  # pyright: ignore[reportAttributeAccessIssue]
    # SGLang asks backends that do not have it.
    TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = _padded_length  # pyright: ignore[reportAttributeAccessIssue]


def _padded_length(backend: object) -> int:
    """Length of the rows that fill up a batch: each attends to one token, and its result is not used."""
    return 1
