"""Scoring and selection for one server: Triton kernels where keys are on a CUDA device, torch references elsewhere.

Triton is imported where it is used, so that everything else works on machines without it.

With kernels, a launch of some requests costs the host little more than the launches themselves: views of the held
memory, and all arguments that depend on the model and on the shape alone, are made once for each shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import torch

from sglang_triattn.kernels.score.reference import phase_rows, score_torch
from sglang_triattn.kernels.score.tables import ScoreTables, check_fits
from sglang_triattn.kernels.score.value_size import LookUps, check_values, value_count, value_size_torch
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.kernels.select.reference import select_torch
from sglang_triattn.kernels.workspace import LIMIT_BYTES, WorkspacePlan

if TYPE_CHECKING:
    from sglang_triattn.kernels.score.latent_kernel import LatentKernel
    from sglang_triattn.kernels.score.score_kernel import ScoreKernel
    from sglang_triattn.kernels.score.value_size_kernel import ValueSizeKernel
    from sglang_triattn.kernels.select.importance_kernel import ImportanceKernel

Key = TypeVar("Key")
Value = TypeVar("Value")

SHAPES = 64
"""Shapes of launches that are remembered: a server's rounds have few."""

ANGLES = 1 << 18
"""Phases, of all requests at once, whose angles are held in float64: a few MiB."""


@dataclass(frozen=True, eq=False)
class Piece:
    """Scores of some layers of some requests, [rows, layers, H_q, N] float32, in memory that the next piece overwrites.

    Columns from `lengths[r] - recent` on are unwritten.
    """

    rows: slice
    layers: slice
    scores: torch.Tensor


@dataclass(frozen=True, eq=False)
class Chosen:
    """What stays of some requests; with kernels in memory that the next ones overwrite.

    Attributes:
        rows: which requests.
        kept: as `Scorer.keep` returns it, but int32 with kernels.
        lists: with kernels, two tensors [rows, ..., moves] int32, shaped like `kept`, for `Mover.move`.
    """

    rows: slice
    kept: torch.Tensor
    lists: tuple[torch.Tensor, torch.Tensor] | None = None


class _Kernels(NamedTuple):
    """What is launched for some layers; None where the Scorer does not decide by it."""

    score: ScoreKernel | LatentKernel | None
    merge: ImportanceKernel
    sizes: ValueSizeKernel | None


class _Step(NamedTuple):
    """One launch's part of some layers: kernels and views of the held memory."""

    layers: slice
    kernels: _Kernels
    parts: dict[str, torch.Tensor]
    sets: slice
    """The kept sets of these layers, if each layer has its own."""
    kept: torch.Tensor
    """Their memory, [rows, sets, num_kept] int32."""


class _Prepared(NamedTuple):
    """Everything about the launches of one shape."""

    steps: list[_Step]
    kept: torch.Tensor
    """[rows, sets, num_kept] int32."""
    shaped: torch.Tensor
    """The same as `Chosen.kept`."""
    lists: tuple[torch.Tensor, torch.Tensor]


class Scorer:
    """Finds the private tokens that stay, for all due requests at once.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys; must stay where they are.
        tables: the model's constants, on the pool's device.
        num_tokens, longest, limit, most_kept: see `WorkspacePlan`; they decide how much device memory is held and how
            much is scored in one launch. The reference holds nothing and ignores them.
        selection, aggregation: as for `select_torch` and `score_torch`.
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values, whose head_dim may differ; needed by
            `value_share`, and must stay where they are.
        value_share: share, from 0 to 1, of the kept tokens other than the newest that are chosen for the largest
            values, see `select_torch`. If it is 1, no key is scored.
        lookups: weights of `tables`' style by which value sizes are weighed, [L, H_kv, F] float32 on the pool's device.
        recency: power of a token's rank by which values are divided, see `value_size`; rows must be in order.
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
        lookups: torch.Tensor | None = None,
        recency: float = 0.0,
        reduce_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
        memory: torch.Tensor | None = None,
        kernels: bool | None = None,
        most_kept: int | None = None,
    ) -> None:
        check_fits(k_buffers, tables, aggregation)
        self.lookups = None if lookups is None else LookUps(lookups.contiguous(), k_buffers, tables.style)
        """By what value sizes are weighed."""
        check_values(k_buffers, v_buffers, selection, value_share, self.lookups)
        self._chosen = selection_named(selection)
        self.sets = self._chosen.sets(len(k_buffers), tables.num_kv_heads)
        """Kept sets of one request."""
        self._reduce_ranks = reduce_ranks if self._chosen.shared else None
        self._k_buffers, self._tables = k_buffers, tables
        self._aggregation = aggregation
        # Empty if `value_share` is 0, so that nothing reads them.
        self._v_buffers, self._value_share, self._recency = v_buffers or (), value_share, recency
        self.has_kernels = k_buffers[0].is_cuda if kernels is None else kernels
        """Whether the Triton kernels run, and not the references."""
        if self.has_kernels:
            self._prepare_kernels(num_tokens, longest, limit, most_kept, memory)

    def _prepare_kernels(
        self, num_tokens: int, longest: int, limit: int, most_kept: int | None, memory: torch.Tensor | None
    ) -> None:
        """Describes the pools to the kernels, and takes the memory."""
        from sglang_triattn.kernels.compact.move_kernel import check_movable
        from sglang_triattn.kernels.pools import key_pools
        from sglang_triattn.kernels.score.latent_tuning import check_latents, latent_columns
        from sglang_triattn.kernels.select.keep_kernel import KeepKernel

        tables = self._tables
        self._pools = key_pools(self._k_buffers)
        if tables.rotary_start:
            check_latents(self._k_buffers[0], tables)
            self._columns = latent_columns(tables, self._aggregation)
        if self._value_share:
            self._value_pools = key_pools(self._v_buffers)
            check_movable(self._value_pools)
        layers, q_heads, _ = tables.spread.shape
        self.plan = WorkspacePlan(
            layers, q_heads, tables.num_kv_heads, num_tokens, longest, limit,
            selection=self._chosen.name, value_share=self._value_share, most_kept=most_kept,
        )  # fmt: skip
        count = self.plan.bytes() // 4
        if memory is None:
            memory = torch.empty(count, dtype=torch.float32, device=self._k_buffers[0].device)
        if memory.numel() < count:
            raise ValueError(f"the plan needs {count} numbers of memory, got {memory.numel()}")
        self._memory = memory
        self._keep_kernel = KeepKernel()
        self._kernels: dict[tuple[int, int], _Kernels] = {}
        self._prepared: dict[tuple[int, ...], _Prepared] = {}
        self._divided: dict[tuple[int, ...], tuple[int, int]] = {}

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
        # The next ones overwrite what is not copied.
        return torch.cat([part.kept.long() for part in self.in_turn(slots, lengths, next_positions, num_kept, recent)])

    def in_turn(
        self,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        next_positions: torch.Tensor,
        num_kept: int,
        recent: int,
        *,
        moves: int = 0,
        most: int | None = None,
        holes: torch.Tensor | None = None,
    ) -> Iterator[Chosen]:
        """What `keep` returns for some requests after the others, as many at once as the plan and `most` allow.

        Args:
            slots, lengths, next_positions, num_kept, recent: as for `keep`.
            moves: most moves of each kept set, for which there must be memory.
            most: most requests at once.
            holes: [R, sets] int32 for the kernels to fill, made where None: tokens of each set before the first one
                that it drops. The reference does not find them.

        Raises:
            ValueError: as `keep`.
        """
        if not self.has_kernels:
            for rows in slices(len(slots), most or len(slots)):
                yield Chosen(rows, self._refer(slots[rows], lengths[rows], next_positions[rows], num_kept, recent))
            return
        # One integer type, so that there is one compiled kernel; no pool has 2^31 slots.
        slots, lengths = slots.to(torch.int32), lengths.to(torch.int64)
        phases = self._phases(next_positions)
        if holes is None:
            holes = slots.new_empty((len(slots), self.sets), dtype=torch.int32)
        step, group = self._divide(slots.shape[1], num_kept, moves)
        for rows in slices(len(slots), step if most is None else min(step, most)):
            prepared = self._prepare(rows.stop - rows.start, slots.shape[1], group, num_kept, moves)
            self._select(prepared, slots[rows], lengths[rows], phases[rows], num_kept, recent, holes[rows])
            yield Chosen(rows, prepared.shaped, prepared.lists)

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
        if not self.has_kernels:
            return next(self.pieces(slots, lengths, next_positions, recent)).scores
        scores = self._memory.new_empty((len(slots), *self._tables.spread.shape[:2], slots.shape[1]))
        for piece in self.pieces(slots, lengths, next_positions, recent):
            scores[piece.rows, piece.layers] = piece.scores
        return scores

    def pieces(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, recent: int
    ) -> Iterator[Piece]:
        """Scores as `keep` computes them, as much at once as the plan allows; arguments as for `keep`.

        All layers of a row come before those of the next row. A piece covers all layers, or a single row. The
        reference yields one piece.
        """
        if not self.has_kernels:
            made = score_torch(self._k_buffers, slots, next_positions, self._tables, aggregation=self._aggregation)
            yield Piece(slice(0, len(slots)), slice(0, len(self._k_buffers)), made)
            return
        slots, phases = slots.to(torch.int32), self._phases(next_positions)
        count, group = self._divide(slots.shape[1], 0, 0)
        for rows in slices(len(slots), count):
            for step in self._prepare(rows.stop - rows.start, slots.shape[1], group, 0, 0).steps:
                self._score(step, slots[rows], lengths[rows], phases[rows], recent)
                yield Piece(rows, step.layers, step.parts["scores"])

    def _refer(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, num_kept: int, recent: int
    ) -> torch.Tensor:
        """`keep` by the references."""
        large, alone = self._places_for_values(num_kept, recent)
        scores = sizes = None
        if not alone:
            scores = score_torch(self._k_buffers, slots, next_positions, self._tables, aggregation=self._aggregation)
        if alone or large > 0:
            sizes = value_size_torch(self._v_buffers, slots, lengths, recent, self.lookups, self._recency)
        return select_torch(
            scores, lengths, num_kept, recent, selection=self._chosen.name, num_kv_heads=self._tables.num_kv_heads,
            reduce_ranks=self._reduce_ranks, sizes=sizes, value_share=0.0 if sizes is None else self._value_share,
        )  # fmt: skip

    def _places_for_values(self, num_kept: int, recent: int) -> tuple[int, bool]:
        """How many of the kept tokens the value sizes decide, and whether they decide alone: then no key is read."""
        large = value_count(num_kept, recent, self._value_share)
        return large, self._value_share > 0 and large == num_kept - recent

    def _select(
        self,
        prepared: _Prepared,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        phases: torch.Tensor,
        num_kept: int,
        recent: int,
        holes: torch.Tensor,
    ) -> None:
        """Fills the kept sets and `holes` [rows, sets] of the rows of one launch."""
        large, alone = self._places_for_values(num_kept, recent)
        for step in prepared.steps:
            parts, kernels = step.parts, step.kernels
            # For sets of each layer. A launch without all layers covers a single row, so its part is contiguous.
            own = holes if len(prepared.steps) == 1 else holes[:, step.sets]
            if not alone:
                self._score(step, slots, lengths, phases, recent)
                importance = parts["importance"]
                kernels.merge.merge(parts["scores"], parts["moments"], lengths, recent, parts["scales"], importance)
            if kernels.sizes is not None and (alone or large > 0):
                # In the memory of the scores, which nothing reads any more.
                sizes = parts["sizes"]
                kernels.sizes.measure(slots, lengths, recent, sizes)
                if alone:
                    self._keep_kernel.keep(sizes, lengths, num_kept, recent, step.kept, own)
                    continue
                self._keep_kernel.mark(sizes, lengths, large, recent, parts["importance"])
            if self._chosen.per_layer:
                self._keep_kernel.keep(parts["importance"], lengths, num_kept, recent, step.kept, own)
            elif step is prepared.steps[-1]:
                merged = parts["importance"]
                merged = merged if self._reduce_ranks is None else self._reduce_ranks(merged)
                self._keep_kernel.keep(merged, lengths, num_kept, recent, prepared.kept, holes)

    def _score(
        self, step: _Step, slots: torch.Tensor, lengths: torch.Tensor, phases: torch.Tensor, recent: int
    ) -> None:
        """Fills the scores and moments of one launch."""
        assert step.kernels.score is not None
        step.kernels.score.score(slots, lengths, phases, recent, step.parts["scores"], step.parts["moments"])

    def _phases(self, next_positions: torch.Tensor) -> torch.Tensor:
        """`phase_rows` of all requests, [R, O, 2, F]; nothing where no key is read."""
        if self._value_share == 1:
            return next_positions
        tables, aggregation = self._tables, self._aggregation
        each = (len(tables.offsets) if aggregation == "max" else 1) * len(tables.inv_freq)
        parts = [
            phase_rows(tables, next_positions[rows], aggregation)
            for rows in slices(len(next_positions), max(1, ANGLES // each))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _divide(self, *shape: int) -> tuple[int, int]:
        """`WorkspacePlan.launch` for rows of this shape."""
        return remembered(self._divided, shape, lambda: self.plan.launch(*shape))

    def _prepare(self, *shape: int) -> _Prepared:
        """What is launched for a shape: its rows, their tokens, layers at once, kept tokens, moves."""
        return remembered(self._prepared, shape, lambda: self._make(*shape))

    def _make(self, requests: int, num_tokens: int, group: int, num_kept: int, moves: int) -> _Prepared:
        layers, kv_heads = len(self._k_buffers), self._tables.num_kv_heads
        steps = []
        for first in range(0, layers, group):
            span = slice(first, min(first + group, layers))
            parts = self._views(requests, num_tokens, span.stop - first, num_kept, moves)
            kept, sets = parts["kept"], slice(span.start * kv_heads, span.stop * kv_heads)
            own = kept[:, sets] if self._chosen.per_layer else kept
            steps.append(_Step(span, self._kernels_of(span), parts, sets, own))
        kept, lists = steps[0].parts["kept"], (steps[0].parts["sources"], steps[0].parts["targets"])
        shaped, *lists = map(self._shaped, (kept, *lists))
        return _Prepared(steps, kept, shaped, (lists[0], lists[1]))

    def _shaped(self, sets: torch.Tensor) -> torch.Tensor:
        """[R, sets, n] with the dims that `keep` returns."""
        if self._chosen.per_layer:
            return sets.unflatten(1, (-1, self._tables.num_kv_heads))
        return sets[:, 0] if self._chosen.shared else sets

    def _kernels_of(self, span: slice) -> _Kernels:
        """The kernels for some layers, made once."""
        key = (span.start, span.stop)
        if key not in self._kernels:
            self._kernels[key] = self._make_kernels(span)
        return self._kernels[key]

    def _make_kernels(self, span: slice) -> _Kernels:
        from sglang_triattn.kernels.score.latent_kernel import LatentKernel
        from sglang_triattn.kernels.score.score_kernel import ScoreKernel
        from sglang_triattn.kernels.score.value_size_kernel import ValueSizeKernel
        from sglang_triattn.kernels.select.importance_kernel import ImportanceKernel

        layers, (_, q_heads, _) = len(self._k_buffers), self._tables.spread.shape
        pools, tables = self._pools[span], self._tables[span]
        merge = ImportanceKernel(
            span.stop - span.start, q_heads, tables.num_kv_heads, self._chosen.name, span.start, layers - span.stop
        )
        score = None
        if self._value_share != 1:
            score = (
                LatentKernel(pools, tables, self._aggregation, self._columns[span])
                if tables.rotary_start
                else ScoreKernel(pools, tables, self._aggregation)
            )
        sizes = None
        if self._value_share:
            lookups = None if self.lookups is None else self.lookups[span]
            sizes = ValueSizeKernel(self._value_pools[span], pools, lookups, self._recency)
        return _Kernels(score, merge, sizes)

    def _views(self, requests: int, num_tokens: int, layers: int, num_kept: int, moves: int) -> dict[str, torch.Tensor]:
        """Views into the held memory; value sizes as [requests, sets, num_tokens]."""
        views = {}
        for name, (start, shape) in self.plan.parts(requests, num_tokens, layers, num_kept, moves).items():
            part = self._memory[start // 4 : start // 4 + torch.Size(shape).numel()].view(shape)
            views[name] = part.view(torch.int32) if name in ("kept", "sources", "targets") else part
        if "sizes" in views:
            views["sizes"] = views["sizes"].flatten(1, 2)
        return views


def remembered(found: dict[Key, Value], key: Key, make: Callable[[], Value]) -> Value:
    """The value of a key, made if it is not among the SHAPES keys that came last."""
    if key not in found:
        made = make()
        if len(found) == SHAPES:
            del found[next(iter(found))]
        found[key] = made
    return found[key]


def slices(count: int, most: int) -> Iterator[slice]:
    """Slices of about equal size, of `most` requests at most, that cover `count`."""
    parts = -(-count // most)
    for part in range(parts):
        yield slice(count * part // parts, count * (part + 1) // parts)
