"""The reserve of a row: slots after its computed entries, for the tokens that the next steps draft.

SGLang parts: `eagle_prepare_for_decode` (sglang/srt/speculative/eagle_utils.py), which serves every way of drafting
that is covered but one, `DFlashDraftInputV2.prepare_for_decode` (sglang/srt/speculative/dflash_info_v2.py), which does
the same for drafted blocks, and `get_alloc_reserve_per_decode` (sglang/srt/mem_cache/allocation_sizing.py).

Before a step, SGLang sees to it that the row has slots for the tokens that the step drafts, and for as many again, in
whole pages. The step writes K/V of all of them; those that the model agrees with become computed entries.

    0          protected                 committed          allocated
    |-- frozen ---|-- private, computed ------|-- reserve --------|

A round evicts computed entries only. The reserve moves up the row after them and keeps its slots: under overlap
scheduling, a queued step writes to them.

At page size 1, SGLang's rows are a few entries longer than the context, not a reserve: the slots that branches get near
the context's end would be written to the next row. Here rows have room for them, as SGLang's have above page size 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.model.pinned import to_device
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.rounds.plan import Plan, ceil_align

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler


def hooks() -> list[Hook]:
    target = "sglang.srt.mem_cache.kv_cache_configurator.get_req_to_token_extra_context_len"
    return [Hook(target, "after", _make_room, "", why="makes rows long enough for the reserve at the context's end")]


def _make_room(more: int) -> int:
    """Entries of a row beyond the context."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
    from sglang.srt.runtime_context import get_spec

    return more if get_spec().speculative_algorithm is None else max(more, get_alloc_reserve_per_decode())


def tokens_per_step(scheduler: Scheduler) -> int:
    """Most tokens by which a decoding request grows in one step."""
    from sglang.srt.runtime_context import max_speculative_num_draft_tokens

    # The most of all lengths if drafts adapt to what is accepted.
    return 1 if scheduler.spec_algorithm.is_none() else max_speculative_num_draft_tokens() or 1


def reserve_per_row(scheduler: Scheduler) -> int:
    """Slots that a step allocates beyond the computed entries of each row; 0 without speculative decoding."""
    from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

    return 0 if scheduler.spec_algorithm.is_none() else get_alloc_reserve_per_decode()


def allocated_after(rounds: Sequence[tuple[CompressedRow, Plan]]) -> list[int]:
    """Entries of each row after its round, its reserve included."""
    held = [(row.kv.kv_allocated_len, plan) for row, plan in rounds]
    return [plan.new_length if now == plan.old_length else now - plan.freed_slots for now, plan in held]


@dataclass(frozen=True, eq=False)
class Reserves:
    """The reserves of rows that have rounds, where they move.

    Attributes:
        row: [R, 1] int64.
        place: [R, M] int64, columns of the row; a row with fewer repeats its last.
        slots: [R, M] int32, what the columns hold.
        shift: [R, 1] int64, how far they move.
    """

    row: torch.Tensor
    place: torch.Tensor
    slots: torch.Tensor
    shift: torch.Tensor

    def move_up(self, rows: torch.Tensor) -> None:
        """Closes the gap that the round has left before them in `rows`, SGLang's `req_to_token`."""
        rows[self.row, self.place - self.shift] = self.slots

    def put_back(self, rows: torch.Tensor) -> None:
        """Undoes `move_up`."""
        rows[self.row, self.place] = self.slots


def read_reserves(
    rows: torch.Tensor, rounds: Sequence[tuple[CompressedRow, Plan]], *, whole_pages: bool, page_size: int
) -> Reserves | None:
    """Reads the reserves before the rounds; None if no row has any.

    Args:
        rows: SGLang's `req_to_token`, [rows, context] int32.
        rounds: row and plan of each.
        whole_pages: whether the rounds empty the end of the row, where the page of its last entry goes with all it has;
            else they cut whole pages out before the newest tokens.
    """
    found = []
    for each, plan in rounds:
        first = ceil_align(plan.old_length, page_size) if whole_pages else plan.old_length
        if each.kv.kv_allocated_len > first:
            found.append((each.kv.req_pool_idx, first, each.kv.kv_allocated_len - first, plan.freed_slots))
    if not found:
        return None
    row, first, length, shift = to_device(found, rows.device).T.unsqueeze(-1)
    column = torch.arange(max(each[2] for each in found), device=rows.device)
    place = first + column.minimum(length - 1)
    return Reserves(row, place, rows[row, place], shift)
