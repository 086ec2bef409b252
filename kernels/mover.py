"""Compaction by copies for one server: the Triton kernel for a pool on a CUDA device, else the torch reference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_triattn.kernels.compact.reference import list_moves, move_torch


class Mover:
    """Brings kept tokens into the private slots that their requests keep.

    Attributes:
        token_bytes: bytes of one token's keys and values in all layers.

    Args:
        k_buffers, v_buffers: per layer [num_slots, H_kv, head_dim], the KV pool; must stay where they are. A pool of
            latents has no values.
        kernels: whether to use the Triton kernel; by default if the pool is on a CUDA device.

    Attributes:
        begun: calls of `move` so far, also of those that raised.

    Raises:
        ValueError: the kernel cannot read or move what the pool holds.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        v_buffers: Sequence[torch.Tensor],
        *,
        kernels: bool | None = None,
    ) -> None:
        self.begun = 0
        self._layers = len(k_buffers)
        k, v = k_buffers[0], (*v_buffers, k_buffers[0])[0]
        self.token_bytes = sum(buffer[0].nbytes for buffer in (*k_buffers, *v_buffers))
        same_layout = (k.dtype, k.shape, k.stride()) == (v.dtype, v.shape, v.stride())
        # One launch for both, unless keys and values differ in dtype, shape or strides.
        groups = [[*k_buffers, *v_buffers]] if same_layout else [list(k_buffers), list(v_buffers)]
        self._buffers, self._move_kernels = groups, None
        if k_buffers[0].is_cuda if kernels is None else kernels:
            from sglang_triattn.kernels.compact.list_moves_kernel import MovesKernel
            from sglang_triattn.kernels.compact.move_kernel import MoveKernel, check_movable
            from sglang_triattn.kernels.pools import key_pools

            pools = [key_pools(group) for group in groups]
            for each in pools:
                check_movable(each)
            self._list_kernel = MovesKernel()
            self._move_kernels = [MoveKernel(each, self._layers) for each in pools]

    def move(
        self,
        slots: torch.Tensor,
        kept: torch.Tensor,
        strategy: str,
        *,
        cut: int | None = None,
        lengths: torch.Tensor | None = None,
        lists: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Copies K and V of all layers in place; the host never waits.

        Args:
            slots: [R, N] int32 or int64, private slots of each request in row order, right-padded with valid slots.
            kept: [R, num_kept], [R, H_kv, num_kept] or [R, L, H_kv, num_kept] int32 or int64, ascending indices into
                them.
            strategy: "slide" or "fill", see `compact`.
            cut, lengths: as for `list_moves`.
            lists: memory in which the kernel lists the copies, see `list_moves_triton`; made where None.

        Raises:
            ValueError: the strategy is unknown.
        """
        self.begun += 1
        if self._move_kernels is None:
            sources, targets = list_moves(slots, kept, strategy, cut=cut, lengths=lengths)
            for group in self._buffers:
                for first in range(0, len(group), self._layers):
                    move_torch(group[first : first + self._layers], sources, targets)
            return
        from sglang_triattn.kernels.compact.list_moves_kernel import list_moves_triton

        sources, targets = list_moves_triton(
            slots, kept, strategy, cut=cut, lengths=lengths, lists=lists, kernel=self._list_kernel
        )
        for kernel in self._move_kernels:
            kernel.move(sources, targets, ordered=strategy == "slide")

    def copy(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Copies K and V of all layers and heads from slots to other slots; the host never waits.

        Args:
            sources, targets: [M] or [R, M] int32 or int64, which have no slot in common, unless it is copied to itself.
        """
        sources, targets = (
            each.to(torch.int32).reshape(-1, each.shape[-1]).contiguous() for each in (sources, targets)
        )
        if self._move_kernels is None:
            for group in self._buffers:
                move_torch(group, sources, targets)
            return
        for kernel in self._move_kernels:
            kernel.move(sources, targets, ordered=False)
