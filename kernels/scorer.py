"""Scoring and selection for one server: Triton kernels where keys are on a CUDA device, torch references elsewhere.

Triton is imported where it is used, so that everything else works on machines without it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from sglang_triattn.kernels.score.reference import score_torch
from sglang_triattn.kernels.score.tables import ScoreTables, check_fits
from sglang_triattn.kernels.score.value_size import check_values, value_count, value_size_torch
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.kernels.select.reference import select_torch
from sglang_triattn.kernels.workspace import LIMIT_BYTES, WorkspacePlan, padded_bytes

# None, typed as a tensor: only `select_torch` reads it, and takes it to mean that scores or sizes decide alone.
_NOT_MADE = cast(torch.Tensor, None)


@dataclass(frozen=True, eq=False)
class Piece:
    """Scores and value sizes of some layers of some requests; shapes as in `WorkspacePlan`.

    The kernels' tensors lie in memory that the next piece overwrites, except `importance`, which stays for the other
    layers of the same rows. The reference sets only scores and sizes. What was not asked for is None or unwritten.
    """

    rows: slice
    layers: slice
    scores: torch.Tensor = _NOT_MADE
    moments: torch.Tensor = _NOT_MADE
    phases: torch.Tensor = _NOT_MADE
    scales: torch.Tensor = _NOT_MADE
    importance: torch.Tensor = _NOT_MADE
    sizes: torch.Tensor = _NOT_MADE


class Scorer:
    """Finds the private tokens that stay, for all due requests at once.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys; must stay where they are.
        tables: the model's constants, on the pool's device.
        num_tokens, longest, limit: see `WorkspacePlan`; they decide how much device memory is held and how much is
            scored in one launch. The reference holds nothing and ignores them.
        selection, aggregation: as for `select_torch` and `score_torch`.
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values, whose head_dim may differ; needed by
            `value_share`, and must stay where they are.
        value_share: share, from 0 to 1, of the kept tokens other than the newest that are chosen for the largest
            values, see `select_torch`. If it is 1, no key is read.
        reduce_ranks: merges the importance [R, 1, N] of the tensor-parallel ranks, each with its own heads, into one
            that is equal on all of them; used for selections with one kept set. None on a single rank.
        memory: [at least plan.bytes() / 4] float32 on the pool's device to work in, allocated where None.
        kernels: whether to use the Triton kernels; by default if the pool is on a CUDA device.

    A layer's k_scale and v_scale are not needed: they scale all scores and all values of the layer equally, which
    changes no selection. Once built, a Scorer can score any request within its plan.

    Raises:
        ValueError: `tables` do not fit the pool, the selection or aggregation is unknown, `check_values` refuses,
            the kernels cannot read the pool, or `memory` is too small.
    """

    def __init__(
        self,
        k_buffers: Sequence[torch.Tensor],
        tables: ScoreTables,
        *,
        num_tokens: int,
        longest: int,
        limit: int = LIMIT_BYTES,
        selection: str = "union",
        aggregation: str = "mean",
        v_buffers: Sequence[torch.Tensor] | None = None,
        value_share: float = 0.0,
        reduce_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
        memory: torch.Tensor | None = None,
        kernels: bool | None = None,
    ) -> None:
        check_fits(k_buffers, tables, aggregation)
        check_values(k_buffers, v_buffers, selection, value_share)
        self._chosen = selection_named(selection)
        self.sets = self._chosen.sets(len(k_buffers), tables.num_kv_heads)
        """Kept sets of one request."""
        self._reduce_ranks = reduce_ranks if self._chosen.shared else None
        self._k_buffers, self._tables = k_buffers, tables
        self._aggregation = aggregation
        # Empty if `value_share` is 0, so that nothing reads them.
        self._v_buffers, self._value_share = v_buffers or (), value_share
        self._pools = None
        if k_buffers[0].is_cuda if kernels is None else kernels:
            from sglang_triattn.kernels.compact.move_kernel import check_movable
            from sglang_triattn.kernels.pools import key_pools
            from sglang_triattn.kernels.score.latent_tuning import check_latents, latent_columns

            self._pools = key_pools(k_buffers)
            if tables.rotary_start:
                check_latents(k_buffers[0], tables)
                self._columns = latent_columns(tables, aggregation)
            if value_share:
                self._value_pools = key_pools(self._v_buffers)
                check_movable(self._value_pools)
            layers, q_heads, frequencies = tables.spread.shape
            self.plan = WorkspacePlan(
                layers, q_heads, tables.num_kv_heads, frequencies, num_tokens, longest, limit,
                selection=selection, aggregation=aggregation, value_share=value_share,
            )  # fmt: skip
            count = self.plan.bytes() // 4
            if memory is None:
                memory = torch.empty(count, dtype=torch.float32, device=k_buffers[0].device)
            if memory.numel() < count:
                raise ValueError(f"the plan needs {count} numbers of memory, got {memory.numel()}")
            self._memory = memory

    def keep(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, num_kept: int, recent: int
    ) -> torch.Tensor:
        """Indices of the private tokens that stay; the host never waits.

        Args:
            slots: [R, N] int32 or int64, private slots of each request in row order, right-padded with valid slots.
            lengths: [R] int64, private tokens of each request, each at least `num_kept`.
            next_positions: [R] int64, logical position of each request's next token.
            num_kept: tokens that stay, the newest `recent` among them.

        Returns:
            int64 [R, num_kept], ascending; for "per-head" [R, H_kv, num_kept], for "per-layer-head"
            [R, L, H_kv, num_kept].

        Raises:
            ValueError: unless 0 <= recent <= num_kept <= N, or if a row exceeds the plan.
        """
        options = {"selection": self._chosen.name, "num_kv_heads": self._tables.num_kv_heads}
        large = value_count(num_kept, recent, self._value_share)
        # If sizes decide alone, no scores are computed.
        alone = self._value_share > 0 and large == num_kept - recent
        pieces = self.pieces(slots, lengths, next_positions, recent, scored=not alone, sized=alone or large > 0)
        if self._pools is None:
            (piece,) = pieces
            return select_torch(
                piece.scores, lengths, num_kept, recent, reduce_ranks=self._reduce_ranks,
                sizes=piece.sizes, value_share=self._value_share if piece.sizes is not None else 0.0, **options,
            )  # fmt: skip
        from sglang_triattn.kernels.select.importance_kernel import importance_triton
        from sglang_triattn.kernels.select.keep_kernel import keep_triton

        layers, kv_heads = len(self._k_buffers), self._tables.num_kv_heads
        kept = lengths.new_empty((len(slots), self.sets, num_kept), dtype=torch.int64)
        for piece in pieces:
            rows, group, own = piece.rows, piece.layers, lengths[piece.rows]
            # Used for kept sets per layer. A piece without all layers covers a single row, so its part is contiguous.
            target = kept[rows, group.start * kv_heads : group.stop * kv_heads]
            if alone:
                keep_triton(piece.sizes.flatten(1, 2), own, num_kept, recent, kept=target)
                continue
            importance = importance_triton(
                piece.scores, piece.moments, own, recent, scales=piece.scales, importance=piece.importance,
                before=group.start, after=layers - group.stop, **options,
            )  # fmt: skip
            if self._chosen.per_layer:
                if large > 0:
                    # Nothing is kept yet: until then its memory holds the indices of the large values.
                    marked = target.view(-1)[: importance[..., 0].numel() * large].view(*importance.shape[:2], large)
                    keep_triton(piece.sizes.flatten(1, 2), own - recent, large, 0, kept=marked)
                    importance.scatter_(2, marked, float("inf"))
                keep_triton(importance, own, num_kept, recent, kept=target)
            elif group.stop == layers:
                merged = importance if self._reduce_ranks is None else self._reduce_ranks(importance)
                keep_triton(merged, own, num_kept, recent, kept=kept[rows])
        if self._chosen.per_layer:
            return kept.unflatten(1, (layers, kv_heads))
        return kept[:, 0] if self._chosen.shared else kept

    def scores(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, recent: int = 0
    ) -> torch.Tensor:
        """The scores that `keep` decides by, for inspection; arguments as for `keep`.

        Returns:
            [R, L, H_q, N] float32, meaningless from `lengths[r] - recent` on.

        Raises:
            ValueError: `value_share` is 1, so nothing is decided by scores.
        """
        if self._value_share == 1:
            raise ValueError("value_share is 1: nothing is decided by scores")
        if self._pools is None:
            return next(self.pieces(slots, lengths, next_positions, recent)).scores
        scores = self._memory.new_empty((len(slots), *self._tables.spread.shape[:2], slots.shape[1]))
        for piece in self.pieces(slots, lengths, next_positions, recent):
            scores[piece.rows, piece.layers] = piece.scores
        return scores

    def pieces(
        self,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        next_positions: torch.Tensor,
        recent: int,
        *,
        scored: bool = True,
        sized: bool = False,
    ) -> Iterator[Piece]:
        """Scores and value sizes as `keep` computes them, as much at once as the plan allows.

        All layers of a row come before those of the next row. A piece covers all layers, or a single row. The
        reference yields one piece.

        Args:
            slots, lengths, next_positions, recent: as for `keep`.
            scored, sized: which of the two to compute.
        """
        requests, layers = len(slots), len(self._k_buffers)
        if self._pools is None:
            made = {}
            if scored:
                made["scores"] = score_torch(
                    self._k_buffers, slots, next_positions, self._tables, aggregation=self._aggregation
                )
            if sized:
                made["sizes"] = value_size_torch(self._v_buffers, slots, lengths, recent)
            yield Piece(slice(0, requests), slice(0, layers), **made)
            return
        from sglang_triattn.kernels.score.latent_kernel import score_latents_triton
        from sglang_triattn.kernels.score.score_kernel import score_triton
        from sglang_triattn.kernels.score.value_size_kernel import value_size_triton

        row_step, layer_step = self.plan.launch(slots.shape[1])
        for row, layer in itertools.product(range(0, requests, row_step), range(0, layers, layer_step)):
            rows, group = slice(row, min(row + row_step, requests)), slice(layer, min(layer + layer_step, layers))
            piece = Piece(rows, group, **self._workspace(rows.stop - row, slots.shape[1], group.stop - layer))
            if sized:
                value_size_triton(self._value_pools[group], slots[rows], lengths[rows], recent, sizes=piece.sizes)
            if scored:
                arguments = (self._pools[group], slots[rows], lengths[rows], next_positions[rows], self._tables[group])
                made = {"scores": piece.scores, "moments": piece.moments, "phases": piece.phases}
                if self._tables.rotary_start:
                    made["columns"] = self._columns[group]
                    score_latents_triton(*arguments, recent, aggregation=self._aggregation, **made)
                else:
                    score_triton(*arguments, recent, aggregation=self._aggregation, **made)
            yield piece

    def _workspace(self, requests: int, num_tokens: int, layers: int) -> dict[str, torch.Tensor]:
        """Views into the held memory."""
        views, start = {}, 0
        for name, shape in self.plan.parts(requests, num_tokens, layers).items():
            views[name] = self._memory[start : start + torch.Size(shape).numel()].view(shape)
            start += padded_bytes(shape) // 4
        return views
