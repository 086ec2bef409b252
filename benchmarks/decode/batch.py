"""Requests that decode in a paged KV pool: rows of slots, a free list, and this package's rounds.

Page sizes are 1 and 16, as in SGLang: a row names slots, and memory is handed out in whole pages. The free list stays
on the device, also as in SGLang; the host knows only lengths, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.decode.attention import Rows
from benchmarks.decode.model import DTYPE, Shape
from sglang_triattn.kernels.device_round import compact_rows
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.score.tables import ScoreTables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.patches.rounds.launches import shape_for
from sglang_triattn.rounds.plan import Plan, ceil_align, most_kept, plan_round
from sglang_triattn.rounds.rules import RoundRules


class Pool:
    """One block of memory for K and V of all layers, filled at random, in SGLang's layout.

    Args:
        size: in bytes.
    """

    def __init__(self, shape: Shape, size: int, device: str) -> None:
        self.shape = shape
        count = size // DTYPE.itemsize
        generator = torch.Generator(device).manual_seed(1)
        self._memory = torch.empty(count, dtype=DTYPE, device=device).normal_(generator=generator)

    def slots(self, layers: int) -> int:
        """Number of tokens that fit with `layers` layers."""
        return self._memory.numel() * DTYPE.itemsize // self.shape.kv_bytes(layers)

    def buffers(self, layers: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """K and V of each layer, [num_slots, H_kv, D]."""
        shape = (2, layers, self.slots(layers), self.shape.kv_heads, self.shape.head_dim)
        k, v = self._memory[: torch.Size(shape).numel()].view(shape)
        return list(k), list(v)


@dataclass(frozen=True)
class Rounds:
    """What runs the rounds of a batch.

    Attributes:
        mover: None if rows are remapped.
        reference: computes the same scores as `scorer`, in plain torch.
    """

    config: RoundRules
    scorer: Scorer
    mover: Mover | None
    reference: Scorer

    @staticmethod
    def of(config: RoundRules, compaction: str, buffers, tables: ScoreTables) -> Rounds:
        """Built as the server builds them: see `build_compressor` and `make_mover`; `compaction` is remap or fill."""
        k, v = buffers
        due = config.trigger(config.sinks)
        options = {
            "num_tokens": due,
            "longest": due,
            "selection": config.selection,
            "v_buffers": v,
            "value_share": config.value_share,
            "most_kept": most_kept(config, due),
        }
        mover = None if compaction == "remap" else Mover(k, v)
        return Rounds(config, Scorer(k, tables, **options), mover, Scorer(k, tables, **options, kernels=False))

    @property
    def bound(self) -> int:
        """KV entries that a request holds when its round is due; it never holds more."""
        return self.config.sinks + self.config.trigger(self.config.sinks)


class Batch:
    """A batch's state between steps.

    Args:
        rows, positions, slots: the step's static buffers, B requests; `positions` and `slots` [B] int64.
        page_size: number of slots that are handed out together.
        rounds: None to decode with everything cached.
    """

    def __init__(
        self,
        rows: Rows,
        positions: torch.Tensor,
        slots: torch.Tensor,
        page_size: int,
        rounds: Rounds | None,
    ) -> None:
        self.rows, self.positions, self.slots = rows, positions, slots
        self.page_size, self.rounds, self._mark = page_size, rounds, lambda: None
        self._device = positions.device
        self._frozen = rounds.config.sinks if rounds else 0
        self.notes_kept = False
        """Whether `kept` is found, which the rounds of a server do not do."""
        self.kept: dict[int, torch.Tensor] = {}
        """By request whose round ran before the current step: indices into its private tokens that stayed."""

    def start(self, lengths: Sequence[int], logical: Sequence[int], most: int) -> None:
        """Starts requests that hold `lengths` KV entries and have seen `logical` tokens.

        Pages are dealt at random, like the memory of a server that has run for a while.

        Args:
            most: most KV entries that any of them will hold.
        """
        self.lengths, self.logical = list(lengths), list(logical)
        size, width = self.page_size, max(ceil_align(length, self.page_size) for length in lengths)
        counts = [ceil_align(length, size) // size for length in lengths]
        # Page 0 is never handed out, as in SGLang.
        total = self.slots_for(len(lengths), most) // size - 1
        pages = 1 + torch.randperm(total, generator=torch.Generator().manual_seed(2))
        host = torch.zeros(len(lengths), width // size, dtype=torch.int64)
        for row, own in zip(host, pages[: sum(counts)].split(counts), strict=True):
            row[: len(own)] = own
        first = (host[:, :, None] * size + torch.arange(size)).flatten(1)
        self.rows.slots.zero_()
        self.rows.slots[:, :width] = first.to(self._device, torch.int32)
        self._free = pages[sum(counts) :].to(self._device)
        self.rows.lengths.copy_(torch.tensor(self.lengths))
        self.positions.copy_(torch.tensor(self.logical) - 1)

    def slots_for(self, requests: int, most: int) -> int:
        """Slots of a pool in which requests can hold `most` entries each, page 0 included."""
        return self.page_size + requests * ceil_align(most, self.page_size)

    def on_round(self, mark: Callable[[], None]) -> None:
        """Has `mark` called before and after the work of each pass of rounds."""
        self._mark = mark

    def prepare(self) -> None:
        """Runs due rounds, then finds a place for each request's next token."""
        self.kept = {}
        if self.rounds is not None:
            self._run_due_rounds()
        self._extend()

    def _extend(self) -> None:
        """Appends one token to every request: position, length, slot."""
        size, lengths = self.page_size, self.rows.lengths
        opening = [r for r, length in enumerate(self.lengths) if length % size == 0]
        if opening:
            pages, self._free = self._free[: len(opening)], self._free[len(opening) :]
            assert len(pages) == len(opening), "the free list of the benchmark is too short"
            which = slice(None) if len(opening) == len(self.lengths) else self._to_device(opening)
            at = lengths[which].long()[:, None] + torch.arange(size, device=self._device)
            named = (pages[:, None] * size + torch.arange(size, device=self._device)).int()
            request = torch.arange(len(self.lengths), device=self._device)[which][:, None]
            self.rows.slots[request, at] = named
        self.slots.copy_(self.rows.slots.gather(1, lengths.long()[:, None])[:, 0])
        lengths.add_(1)
        self.positions.add_(1)
        self.lengths = [length + 1 for length in self.lengths]
        self.logical = [length + 1 for length in self.logical]

    def _run_due_rounds(self) -> None:
        due = []
        for r, length in enumerate(self.lengths):
            evicted = self.logical[r] - length
            plan = plan_round(
                self.rounds.config, frozen=self._frozen, length=length, evicted_before=evicted, page_size=self.page_size
            )
            if plan is not None:
                due.append((r, plan))
        if due:
            self._mark()
            self._compact([r for r, _ in due], [plan for _, plan in due])
            self._mark()

    def _compact(self, requests: list[int], plans: list[Plan]) -> None:
        """One round of requests of one length, as `Compressor._compact`: snapshot, score and move, rewrite, free."""
        rows, config, frozen, plan = self.rows.slots, self.rounds.config, self._frozen, plans[0]
        assert len({each.private_length for each in plans}) == 1, "rounds of one step have rows of several lengths"
        facts = self._to_device(
            [requests, [each.private_length for each in plans], [each.next_position for each in plans]]
        )
        row, lengths, next_positions = facts
        size = self.page_size
        column = torch.arange(plan.private_length, device=self._device)
        slots = rows[row[:, None], frozen + column]
        keep, scorer = plan.kept_private, self.rounds.scorer
        recent = min(config.recent, keep)
        if self.notes_kept:
            kept = scorer.keep(slots, lengths, next_positions, keep, recent)
            self.kept = dict(zip(requests, kept, strict=True))
        shape = shape_for(config, plan, recent, moves=self.rounds.mover is not None, page_size=size)
        first = shape.cut
        unchanged, ordered = compact_rows(
            scorer, self.rounds.mover, slots, lengths, next_positions, keep, recent, shape.strategy, first
        )
        self._read_later(frozen + unchanged)
        if ordered is not None:
            slots = ordered
            rows[row[:, None], frozen + column[:keep]] = slots[:, :keep]
        elif first < keep:
            # With the slots of the last page that no token has taken yet.
            end = ceil_align(plan.old_length, size)
            rows[row, frozen + first : end - plan.evicted_tokens] = rows[
                row, frozen + first + plan.evicted_tokens : end
            ]
        start = ceil_align(frozen + first, size) - frozen
        emptied = slots[:, start : first + plan.evicted_tokens : size].reshape(-1)
        self._free = torch.cat([self._free, emptied.long() // size])
        self.rows.lengths.index_add_(0, row, self._to_device([-each.evicted_tokens for each in plans]).int())
        for r, each in zip(requests, plans, strict=True):
            self.lengths[r] = each.new_length

    def _read_later(self, values: torch.Tensor) -> None:
        """Copies the first hole of each row as a server does: to the host, where it is read rounds later."""
        if values.is_cuda:
            self._holes = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._holes.copy_(values, non_blocking=True)

    def _to_device(self, values: list) -> torch.Tensor:
        host = torch.tensor(values, dtype=torch.int64, pin_memory=self._device.type == "cuda")
        return host.to(self._device, non_blocking=True)
