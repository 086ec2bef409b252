"""Compaction by copies for one server: the Triton kernel where the pool is on a CUDA device, the twin elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_triattn.kernels.compact import list_moves, move_naive


class Mover:
    """Brings kept tokens to the front of their requests' private slots.

    Args:
        k_buffers, v_buffers: per layer [num_slots, H_kv, head_dim], the KV pool; must stay where they are.
        kernels: whether to use the Triton kernel, by default where the pool is on a CUDA device.

    Raises ValueError if the kernel cannot read the pool.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        *,
        kernels: bool | None = None,
    ) -> None:
        self._layers = len(k_buffers)
        alike = k_buffers[0].shape == v_buffers[0].shape and k_buffers[0].stride() == v_buffers[0].stride()
        # One launch for both, unless values are of another width than keys.
        groups = [[*k_buffers, *v_buffers]] if alike else [list(k_buffers), list(v_buffers)]
        self._buffers, self._pools = groups, None
        if k_buffers[0].is_cuda if kernels is None else kernels:
            from sglang_triattn.kernels.key_pools import key_pools

            self._pools = [key_pools(group) for group in groups]

    def move(self, slots: torch.Tensor, kept: torch.Tensor, strategy: str) -> None:
        """Copies K and V of all layers in place; the host never waits.

        Args:
            slots: [R, N] int32 or int64, private slots of each request in row order, right-padded with valid slots.
            kept: [R, keep], [R, H_kv, keep] or [R, L, H_kv, keep] int64, ascending indices into them.
            strategy: "slide" or "fill", see `compact`.
        """
        sources, targets = list_moves(slots, kept, strategy)
        if self._pools is None:
            for group in self._buffers:
                for first in range(0, len(group), self._layers):
                    move_naive(group[first : first + self._layers], sources, targets)
            return
        from sglang_triattn.kernels.compact_triton import move_triton

        for pools in self._pools:
            move_triton(pools, sources, targets, layers=self._layers, ordered=strategy == "slide")
