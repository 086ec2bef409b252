"""Scoring and selection for one server: Triton kernels where keys are on a CUDA device, naive twins elsewhere.

Triton is imported where it is used, so that everything else works on machines without it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang_triattn.kernels.score import CHUNK, OFFSETS, ScoreTables, score_naive
from sglang_triattn.kernels.select import SHARED, importance_naive, keep_naive, kept_sets, select_naive

_ALIGNMENT = 256


LIMIT_BYTES = 64 << 20
"""Device memory that a `Scorer` holds, unless a single request needs more."""


@dataclass(frozen=True)
class ScratchPlan:
    """Device memory of a `Scorer`, known before the first request.

    Args:
        layers, q_heads, kv_heads, frequencies: of the model.
        columns: private tokens of one request that all layers are scored for in one launch.
        longest: most private tokens that any request can have. One that has more than `columns` may take several
            launches, some layers each.
        limit: bytes to hold; more only where one of those two needs more.
        selection, aggregation: as for `select_naive` and `score_naive`.
    """

    layers: int
    q_heads: int
    kv_heads: int
    frequencies: int
    columns: int
    longest: int
    limit: int = LIMIT_BYTES
    selection: str = "union"
    aggregation: str = "mean"

    def parts(self, requests: int, columns: int, layers: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 tensors for `layers` layers of `requests` rows of `columns` tokens each.

        Importance comes first: it stays where it is while groups of layers, not all equal in size, add to it.
        """
        sets = kept_sets(self.selection, layers, self.kv_heads)
        rows = (requests, layers, self.q_heads)
        return {
            "importance": (requests, sets, columns),
            "units": (requests, len(OFFSETS) if self.aggregation == "max" else 1, 2, self.frequencies),
            "scores": (*rows, columns),
            "moments": (*rows, -(-columns // CHUNK), 2),
            "scales": (*rows, 2),
        }

    def needs(self, requests: int, columns: int, layers: int) -> int:
        """Bytes that `parts` take."""
        return sum(_padded(shape) for shape in self.parts(requests, columns, layers).values())

    def bytes(self) -> int:
        """Bytes held from start to end, whatever requests come."""
        least = max(self.needs(1, self.columns, self.layers), self.needs(1, self.longest, 1))
        return max(self.limit // _ALIGNMENT * _ALIGNMENT, least)

    def launch(self, columns: int) -> tuple[int, int]:
        """(requests, layers) to score at once where rows have `columns` tokens.

        Depends on nothing but the row's width, which is the widest request's. That does not matter to a narrower
        one: its result has the same bits however the layers are cut.

        Raises ValueError if one layer of one request does not fit.
        """
        total = self.bytes()
        layers = next((n for n in range(self.layers, 0, -1) if self.needs(1, columns, n) <= total), 0)
        if not layers:
            raise ValueError(f"a row of {columns} tokens exceeds the {max(self.columns, self.longest)} planned for")
        if layers < self.layers:
            # Launches of about equal size.
            return 1, -(-self.layers // -(-self.layers // layers))
        requests = total // self.needs(1, columns, layers)
        # Parts of several requests lie closer together than those of one do.
        while self.needs(requests + 1, columns, layers) <= total:
            requests += 1
        return requests, layers


class Scorer:
    """Finds the private tokens that stay, for all due requests at once.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys; must stay where they are.
        tables: the model's constants, on the pool's device.
        columns, longest, limit: see `ScratchPlan`; they decide how much device memory is held and how much is scored
            in one launch. The twin holds nothing and takes no notice of them.
        selection, aggregation: as for `select_naive` and `score_naive`.
        across: merges the importance [R, 1, N] of tensor-parallel ranks, each of which has its own heads, into one
            that is equal on all of them; used for selections with one kept set. None on a single rank.
        memory: [at least plan.bytes() / 4] float32 on the pool's device to work in, allocated where None.
        kernels: whether to use the Triton kernels, by default where the pool is on a CUDA device.

    A layer's k_scale is not asked for: it scales all scores of the layer, which no selection notices.

    Raises ValueError if the kernels cannot read the pool, or `memory` is too small.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        tables: ScoreTables,
        *,
        columns: int,
        longest: int,
        limit: int = LIMIT_BYTES,
        selection: str = "union",
        aggregation: str = "mean",
        across: Callable[[torch.Tensor], torch.Tensor] | None = None,
        memory: torch.Tensor | None = None,
        kernels: bool | None = None,
    ) -> None:
        self._across = across if selection in SHARED else None
        self._k_buffers, self._tables = k_buffers, tables
        self._selection, self._aggregation = selection, aggregation
        self._pools = self._memory = None
        if k_buffers[0].is_cuda if kernels is None else kernels:
            from sglang_triattn.kernels.key_pools import key_pools

            self._pools = key_pools(k_buffers)
            layers, q_heads, frequencies = tables.spread.shape
            self.plan = ScratchPlan(
                layers, q_heads, tables.num_kv_heads, frequencies, columns, longest, limit,
                selection=selection, aggregation=aggregation,
            )  # fmt: skip
            count = self.plan.bytes() // 4
            if memory is None:
                memory = torch.empty(count, dtype=torch.float32, device=k_buffers[0].device)
            if memory.numel() < count:
                raise ValueError(f"the plan needs {count} numbers of memory, got {memory.numel()}")
            self._memory = memory

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
            importance = importance_naive(
                scores, lengths, recent, selection=self._selection, num_kv_heads=self._tables.num_kv_heads
            )
            if self._across is not None:
                importance = self._across(importance[:, None])[:, 0]
            return keep_naive(importance, lengths, keep, recent)
        step, layers = self.plan.launch(slots.shape[1])
        parts = [
            self._keep_on_device(
                slots[r : r + step], lengths[r : r + step], next_positions[r : r + step], keep, recent, layers
            )
            for r in range(0, len(slots), step)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _keep_on_device(self, slots, lengths, next_positions, keep: int, recent: int, step: int) -> torch.Tensor:
        """`keep` of rows that fit together, `step` layers at a time."""
        from sglang_triattn.kernels.keep_triton import keep_triton

        layers, kv_heads = len(self._k_buffers), self._tables.num_kv_heads
        alone = self._selection == "per-layer-head"
        kept = []
        for first in range(0, layers, step):
            group = slice(first, min(first + step, layers))
            importance = self._importance(slots, lengths, next_positions, recent, group)
            if alone:
                kept.append(keep_triton(importance, lengths, keep, recent).unflatten(1, (-1, kv_heads)))
        if alone:
            return kept[0] if len(kept) == 1 else torch.cat(kept, dim=1)
        if self._across is not None:
            importance = self._across(importance)
        kept = keep_triton(importance, lengths, keep, recent)
        return kept if self._selection == "per-head" else kept[:, 0]

    def _importance(self, slots, lengths, next_positions, recent: int, group: slice) -> torch.Tensor:
        """Importance [R, S, N] after the layers of `group`, merged with that of the layers before them."""
        from sglang_triattn.kernels.importance_triton import importance_triton
        from sglang_triattn.kernels.score_triton import score_triton

        held = self._scratch(*slots.shape, group.stop - group.start)
        scores, moments = score_triton(
            self._pools[group], slots, lengths, next_positions, self._tables[group], recent,
            aggregation=self._aggregation, scores=held["scores"], moments=held["moments"], units=held["units"],
        )  # fmt: skip
        return importance_triton(
            scores, moments, lengths, recent,
            selection=self._selection, num_kv_heads=self._tables.num_kv_heads,
            scales=held["scales"], importance=held["importance"],
            before=group.start, after=len(self._k_buffers) - group.stop,
        )  # fmt: skip

    def _scratch(self, requests: int, columns: int, layers: int) -> dict[str, torch.Tensor]:
        """Views into the memory held."""
        views, start = {}, 0
        for name, shape in self.plan.parts(requests, columns, layers).items():
            views[name] = self._memory[start : start + torch.Size(shape).numel()].view(shape)
            start += _padded(shape) // 4
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
