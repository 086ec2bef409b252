"""Compaction rounds that are scored together: what is read from their rows and written to them.

SGLang part: `ReqToTokenPool.req_to_token`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch

from sglang_triattn.kernels.compact.reference import cut_column, moves_of, needs_order
from sglang_triattn.patches.model.pinned import to_device
from sglang_triattn.patches.request.draft_reserve import Reserves, read_reserves
from sglang_triattn.patches.request.fields import rotary_shift_of
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.rounds.plan import Plan, ceil_align
from sglang_triattn.rounds.rules import RoundRules


class RoundShape(NamedTuple):
    """What the rounds of one launch have in common.

    Attributes:
        num_kept: private tokens that stay.
        recent: how many of them are the newest.
        strategy: "remap", "slide" or "fill".
        cut: the first private column that is emptied, see `kernels.compact`; `num_kept` if only the row's end is.
        width: the power of two that bounds their private lengths from above, so a row is padded to at most twice its
            length, however long another one is.
    """

    num_kept: int
    recent: int
    strategy: str
    cut: int
    width: int

    def most_moves(self, plan: Plan) -> int:
        """Most tokens whose K/V a round copies, in each layer and head; how many it is, only the device knows."""
        return 0 if self.strategy == "remap" else moves_of(self.strategy, self.num_kept, plan.private_length)

    def most_followed(self, plan: Plan, *, ahead: bool) -> int:
        """The same of a draft model, see `Follower`."""
        if not ahead:
            return self.most_moves(plan)
        if self.strategy == "remap":
            return moves_of("fill", self.num_kept, plan.private_length)
        return self.most_moves(plan) + 1

    def unordered_len(self, plan: Plan, before: int) -> int:
        """Entries at the front of a row that are out of order after a round; `before` is their number before it."""
        if self.strategy != "fill":
            return min(before, plan.new_length)
        return plan.new_length - (self.recent if self._keeps_order else 0)

    @property
    def _keeps_order(self) -> bool:
        """Whether the newest tokens stay in order."""
        return self.strategy != "fill" or self.cut + self.recent <= self.num_kept

    def tail(self, plan: Plan) -> int:
        """Newest entries of a row whose tokens follow one another after a round: input tokens move away from them."""
        after_inputs = plan.old_length - max((stop for _, stop in plan.moved), default=0)
        return min(self.recent, after_inputs) if self._keeps_order else 0


@dataclass(frozen=True, eq=False)
class MovedInputs:
    """Input tokens of resumed turns that move to the front of one row's private part, see `rounds.inputs`.

    Attributes:
        row: its line in `req_to_token`.
        first: where they move to.
        before: [n] int32, the slots from there to the row's end, as they are.
        after: [n] int32, the same slots, those of the input tokens first.
    """

    row: int
    first: int
    before: torch.Tensor
    after: torch.Tensor

    @classmethod
    def read(cls, rows: torch.Tensor, row: CompressedRow, plan: Plan) -> MovedInputs:
        """Reads the row of a round that moves any, and orders its slots anew; `rows` as for `snapshot`."""
        first, end, others = plan.target, plan.target, []
        for start, stop in plan.moved:
            others.append((end, start))
            end = stop
        others.append((end, plan.old_length))
        number = cast(int, row.kv.req_pool_idx)
        before = rows[number, first : plan.old_length].clone()
        after = torch.cat([before[start - first : stop - first] for start, stop in (*plan.moved, *others)])
        return cls(number, first, before, after)

    def write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Writes `before` or `after` to the row."""
        rows[self.row, self.first : self.first + len(slots)] = slots


@dataclass(frozen=True, eq=False)
class Launch:
    """Rounds that are scored together.

    Attributes:
        rounds: row and plan of each.
        slots: [R, N] int32, a copy of the rows' private parts, right-padded with slots of the same row; without the
            input tokens that move to before them.
        row_info: [4, R] int64 on the rows' device: row, first private position, private length, rotary position of
            the next token.
        reserves: the slots after their computed entries; None without any.
        inputs: for each row from which input tokens move.
    """

    shape: RoundShape
    rounds: Sequence[tuple[CompressedRow, Plan]]
    slots: torch.Tensor
    row_info: torch.Tensor
    reserves: Reserves | None = None
    inputs: Sequence[MovedInputs] = ()

    def close_up(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Packs the slots that stay side by side in `rows`, SGLang's `req_to_token`.

        Args:
            slots: [R, N] as `Launch.slots`; for "remap" reordered, with those that stay first.
        """
        for moved in self.inputs:
            moved.write(rows, moved.after)
        shape, (row, frozen, lengths, _) = self.shape, self.row_info.unsqueeze(-1)
        first = 0 if shape.strategy == "remap" else shape.cut
        if first < shape.num_kept:
            place = columns(shape.num_kept, rows.device)[first:]
            source = place.expand(len(slots), -1) if shape.strategy == "remap" else place + lengths - shape.num_kept
            rows[row, frozen + place] = slots.gather(1, source)
        if self.reserves is not None:
            self.reserves.move_up(rows)

    def put_back(self, rows: torch.Tensor) -> None:
        """Undoes `close_up`, before anything of the rows is freed."""
        row, frozen, lengths, _ = self.row_info.unsqueeze(-1)
        column = columns(self.slots.shape[1], rows.device)
        rows[row, frozen + column.minimum(lengths - 1)] = self.slots
        for moved in self.inputs:
            moved.write(rows, moved.before)
        if self.reserves is not None:
            self.reserves.put_back(rows)

    def emptied(self, slots: torch.Tensor, page_size: int) -> list[torch.Tensor]:
        """One slot of each page that no longer holds a token of its row; `slots` as for `close_up`.

        One tensor for adjacent rounds that empty the same columns, which those of one launch mostly do.
        """
        cut = self.shape.cut
        spans = [
            (ceil_align(plan.frozen + cut, page_size) - plan.frozen, plan.evicted_tokens + cut)
            for _, plan in self.rounds
        ]
        found, first = [], 0
        for (start, stop), group in itertools.groupby(spans):
            last = first + sum(1 for _ in group)
            found.append(slots[first:last, start:stop:page_size].reshape(-1))
            first = last
        return found


def shape_for(
    settings: RoundRules, plan: Plan, recent: int, *, moves: bool, page_size: int, ordered: bool = False
) -> RoundShape:
    """Chooses how a round goes: by the strategy that copies least, unless something relies on the order that it loses,
    as a `recency` does.

    Args:
        recent: newest private tokens that are certain to stay, in order now.
        moves: whether K/V must move; if not, the row is permuted.
        ordered: whether they must stay in order, whether or not later rounds rely on it.
    """
    num_kept, strategy, cut = plan.kept_private, "remap", None
    if moves:
        cut = cut_column(num_kept, recent, plan.frozen, plan.evicted_tokens, page_size)
        if cut is None and (settings.window or settings.round_to > 1):
            raise RuntimeError("a round would copy the newest tokens, on whose places window layers or drafts rely")
        needed = ordered or needs_order(settings.recent, settings.interval)
        strategy = "slide" if settings.recency or (cut is None and needed) else "fill"
    return RoundShape(num_kept, recent, strategy, num_kept if cut is None else cut, width_for(plan.private_length))


@functools.lru_cache(maxsize=16)
def columns(count: int, device: torch.device) -> torch.Tensor:
    """0 to `count` - 1, int64; made once for each length, on the stream on which rows are read and written."""
    return torch.arange(count, device=device)


def width_for(length: int) -> int:
    """The power of two for rows of `length` private tokens."""
    return 1 << (length - 1).bit_length()


def snapshot(
    rows: torch.Tensor,
    rounds: Sequence[tuple[CompressedRow, Plan]],
    shape_of: Callable[..., RoundShape],
    page_size: int,
) -> list[Launch]:
    """Makes the launches for `rounds` (row, plan), in the order in which their shapes first appear.

    All counts go to the device in one copy.

    Args:
        rows: SGLang's `req_to_token`, [rows, context] int32.
        shape_of: the shape of a round, from its row and its plan.
    """
    groups: dict[RoundShape, list[tuple[CompressedRow, Plan]]] = {}
    for row, plan in rounds:
        groups.setdefault(shape_of(row, plan), []).append((row, plan))
    ordered = [member for group in groups.values() for member in group]
    row_info = to_device(
        [
            [row.kv.req_pool_idx for row, _ in ordered],
            [plan.frozen for _, plan in ordered],
            [plan.private_length for _, plan in ordered],
            [plan.next_position + rotary_shift_of(row.request) for row, plan in ordered],
        ],
        rows.device,
    )
    launches, first = [], 0
    for shape, group in groups.items():
        own = row_info[:, first : first + len(group)]
        first += len(group)
        index, frozen, length, _ = own.unsqueeze(-1)
        column = columns(max(plan.private_length for _, plan in group), rows.device)
        slots = rows[index, frozen + column.minimum(length - 1)]
        inputs = []
        for place, (row, plan) in enumerate(group):
            if plan.moved:
                inputs.append(MovedInputs.read(rows, row, plan))
                slots[place, : plan.private_length] = inputs[-1].after[plan.moved_len :]
                slots[place, plan.private_length :] = inputs[-1].after[-1]
        emptied_at_end = shape.strategy != "remap" and shape.cut == shape.num_kept
        reserves = read_reserves(rows, group, whole_pages=emptied_at_end, page_size=page_size)
        launches.append(Launch(shape, group, slots, own, reserves, inputs))
    return launches
