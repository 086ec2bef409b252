"""Scoring and selection for one server: Triton kernels where keys are on a CUDA device, naive twins elsewhere.

Triton is imported where it is used, so that everything else works on machines without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_triattn.kernels.score import CHUNK, ScoreTables, score_naive
from sglang_triattn.kernels.select import kept_sets, select_naive

_ALIGNMENT = 256


@dataclass(frozen=True)
class ScratchPlan:
    """Device memory of a `Scorer`, known before the first request.

    Args:
        layers, q_heads, kv_heads, frequencies: of the model.
        columns: private tokens that are scored in one launch, rows padded to the longest: R * N at most.
        selection, aggregation: as for `select_naive` and `score_naive`.
    """

    layers: int
    q_heads: int
    kv_heads: int
    frequencies: int
    columns: int
    selection: str = "union"
    aggregation: str = "mean"

    def parts(self, requests: int, columns: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 tensors for `requests` rows of `columns` tokens each."""
        sets = kept_sets(self.selection, self.layers, self.kv_heads)
        rows = (requests, self.layers, self.q_heads)
        return {
            "scores": (*rows, columns),
            "moments": (*rows, -(-columns // CHUNK), 2),
            "scales": (*rows, 2),
            "importance": (requests, sets, columns),
        }

    def bytes(self) -> int:
        """Bytes held from start to end, whatever requests come.

        Many short rows need the most: each has its own sums.
        """
        requests = -(-self.columns // CHUNK)
        return sum(_padded(shape) for shape in self.parts(requests, CHUNK).values()) + 4 * _ALIGNMENT

    def most_requests(self, columns: int) -> int:
        """How many rows of `columns` tokens fit, at least one."""
        total = self.bytes()
        requests = max(1, total // sum(_padded(shape) for shape in self.parts(1, columns).values()))
        while requests > 1 and sum(_padded(shape) for shape in self.parts(requests, columns).values()) > total:
            requests -= 1
        return requests


class Scorer:
    """Finds the private tokens that stay, for all due requests at once.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys; must stay where they are.
        tables: the model's constants, on the pool's device.
        columns: private tokens that are scored in one launch on a CUDA device, at least those of one request; more
            of them take further launches. Decides how much scratch is held, see `ScratchPlan`.
        selection, aggregation: as for `select_naive` and `score_naive`.
        kernels: whether to use the Triton kernels, by default where the pool is on a CUDA device.

    A layer's k_scale is not asked for: it scales all scores of the layer, which no selection notices.

    Raises ValueError if the kernels cannot read the pool.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        tables: ScoreTables,
        *,
        columns: int,
        selection: str = "union",
        aggregation: str = "mean",
        kernels: bool | None = None,
    ) -> None:
        self._k_buffers, self._tables = k_buffers, tables
        self._selection, self._aggregation = selection, aggregation
        self._pools = self._memory = None
        if k_buffers[0].is_cuda if kernels is None else kernels:
            from sglang_triattn.kernels.key_pools import key_pools

            self._pools = key_pools(k_buffers)
            layers, q_heads, frequencies = tables.spread.shape
            self.plan = ScratchPlan(layers, q_heads, tables.num_kv_heads, frequencies, columns, selection, aggregation)
            self._memory = torch.empty(self.plan.bytes() // 4, dtype=torch.float32, device=k_buffers[0].device)

    def keep(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, keep: int, recent: int
    ) -> torch.Tensor:
        """Indices of the private tokens that stay; the host never waits.

        Args:
            slots: [R, N] int32 or int64, private slots of each request in row order, right-padded with valid slots.
            lengths: [R] int64, private tokens of each request, each at least `keep`.
            next_positions: [R] int64, logical position of each request's next token.
            keep: tokens that stay, the newest `recent` among them.

        Returns:
            int64 [R, keep], ascending; for "per-head" [R, H_kv, keep], for "per-layer-head" [R, L, H_kv, keep].
        """
        if self._pools is None:
            scores = score_naive(self._k_buffers, slots, next_positions, self._tables, aggregation=self._aggregation)
            return select_naive(
                scores, lengths, keep, recent, selection=self._selection, num_kv_heads=self._tables.num_kv_heads
            )
        step = self.plan.most_requests(slots.shape[1])
        parts = [
            self._keep_on_device(slots[r : r + step], lengths[r : r + step], next_positions[r : r + step], keep, recent)
            for r in range(0, len(slots), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keep_on_device(self, slots, lengths, next_positions, keep: int, recent: int) -> torch.Tensor:
        from sglang_triattn.kernels.score_triton import score_triton
        from sglang_triattn.kernels.select_triton import select_triton

        held = self._scratch(*slots.shape)
        scores, moments = score_triton(
            self._pools, slots, lengths, next_positions, self._tables, recent,
            aggregation=self._aggregation, scores=held["scores"], moments=held["moments"],
        )  # fmt: skip
        return select_triton(
            scores, moments, lengths, keep, recent,
            selection=self._selection, num_kv_heads=self._tables.num_kv_heads,
            scales=held["scales"], importance=held["importance"],
        )  # fmt: skip

    def _scratch(self, requests: int, columns: int) -> dict[str, torch.Tensor]:
        """Views into the memory held.

        Raises ValueError if one request alone is longer than the plan allows.
        """
        views, start = {}, 0
        for name, shape in self.plan.parts(requests, columns).items():
            count = _padded(shape) // 4
            if start + count > self._memory.numel():
                raise ValueError(f"{requests} rows of {columns} tokens exceed the {self.plan.columns} planned for")
            views[name] = self._memory[start : start + count][: torch.Size(shape).numel()].view(shape)
            start += count
        return views


def score(
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    lengths: torch.Tensor,
    next_positions: torch.Tensor,
    tables: ScoreTables,
    recent: int,
    *,
    aggregation: str = "mean",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scores of private tokens, by the kernel on a CUDA device and by the twin elsewhere.

    Args:
        recent: newest tokens of each request that are no candidates.

    Other arguments as for `score_triton`, with padded columns holding valid slots.

    Returns:
        scores [R, L, H_q, N] float32, meaningless from `lengths[r]` on; what `select` needs beside them.
    """
    if not k_buffers[0].is_cuda:
        return score_naive(k_buffers, slots, next_positions, tables, aggregation=aggregation), None
    from sglang_triattn.kernels.key_pools import key_pools
    from sglang_triattn.kernels.score_triton import score_triton

    pools = key_pools(k_buffers)
    return score_triton(pools, slots, lengths, next_positions, tables, recent, aggregation=aggregation)


def select(
    scores: torch.Tensor,
    moments: torch.Tensor | None,
    lengths: torch.Tensor,
    keep: int,
    recent: int,
    *,
    selection: str,
    num_kv_heads: int,
) -> torch.Tensor:
    """Indices of the private tokens that stay, from what `score` returned; see `select_naive`."""
    options = {"selection": selection, "num_kv_heads": num_kv_heads}
    if moments is None:
        return select_naive(scores, lengths, keep, recent, **options)
    from sglang_triattn.kernels.select_triton import select_triton

    return select_triton(scores, moments, lengths, keep, recent, **options)


def _padded(shape: tuple[int, ...]) -> int:
    """Bytes of a float32 tensor, rounded up so that the next one is aligned."""
    return -(-torch.Size(shape).numel() * 4 // _ALIGNMENT) * _ALIGNMENT
