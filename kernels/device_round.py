"""The device's part of a round: score, select, then permute the row or move K/V, for requests that share a launch.

Requests do not see one another, so they are processed in slices, however many are due at once. With kernels, a slice is
what fits into the memory that the Scorer holds, which the plan that sized the KV pool counts. Not counted is what the
references make, and what ordering rows takes, at most SLICE_BYTES.
"""

from __future__ import annotations

from typing import cast

import torch

from sglang_triattn.kernels.compact.reference import moves_of, remap, unchanged_start
from sglang_triattn.kernels.follower import Follower
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.scorer import Scorer

SLICE_BYTES = 64 << 20
"""Memory of a slice on top of what the Scorer holds, unless a single request needs more."""


def compact_rows(
    scorer: Scorer,
    mover: Mover | None,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    next_positions: torch.Tensor,
    num_kept: int,
    recent: int,
    strategy: str,
    cut: int | None = None,
    follower: Follower | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Brings the kept tokens of R requests into the private slots that the requests keep; the host never waits.

    Args:
        mover: needed unless `strategy` is "remap".
        slots, lengths, next_positions, num_kept, recent: as for `Scorer.keep`.
        strategy: "remap", "slide" or "fill", see `compact`.
        cut: as for `list_moves`; the caller removes the emptied stretch from the row.
        follower: of a draft model, whose K/V lie in slots of the same numbers; None if there is none.

    Returns:
        unchanged: [R] int32, leading private columns of each request whose K/V stay as they are, in both models.
        ordered: [R, N] like `slots`, the rows as ordered by `remap`; None if K/V was moved instead.

    Raises:
        ValueError: the strategy is unknown, or `Scorer.keep` raises.
    """
    remaps, num_tokens = strategy == "remap", slots.shape[1]
    moves = 0 if remaps else moves_of(strategy, num_kept, num_tokens)
    holes = lengths.new_empty((len(slots), scorer.sets), dtype=torch.int32)
    ordered = torch.empty_like(slots) if remaps else None
    most = max(1, SLICE_BYTES // request_bytes(scorer, num_kept, num_tokens, strategy, follows=follower is not None))
    for part in scorer.in_turn(slots, lengths, next_positions, num_kept, recent, moves=moves, most=most, holes=holes):
        rows, kept = part.rows, part.kept
        if not scorer.has_kernels:
            holes[rows] = unchanged_start(kept)[:, None].int()
        if ordered is not None:
            ordered[rows] = remap(slots[rows], kept)
        else:
            mine, own = slots[rows], lengths[rows]
            cast(Mover, mover).move(mine, kept, strategy, cut=cut, lengths=own, lists=part.lists)
        if follower is not None:
            # The lists of the other model's moves are not needed any more.
            follower.follow(slots[rows], kept, strategy, cut=cut, lengths=lengths[rows], lists=part.lists)
        # Released here, so that it never coexists with the next slice's.
        del part, kept
    unchanged = holes.amin(1)
    # At the cut, another token always moves up.
    unchanged = unchanged if cut is None else unchanged.clamp_max_(cut)
    if follower is not None and follower.ahead:
        # Its K/V move one column before.
        unchanged = (unchanged - 1).clamp_min_(0)
    return unchanged, ordered


def request_bytes(scorer: Scorer, num_kept: int, num_tokens: int, strategy: str, *, follows: bool = False) -> int:
    """Bytes that one request of a slice needs on top of what the Scorer holds; at least 1.

    Args:
        num_tokens: private tokens of the longest request of the launch.
        follows: whether a draft model follows.
    """
    # Four int64 and two bytes per private token: places of kept and evicted tokens are counted separately.
    ordering = num_tokens * 42 if strategy == "remap" else 0
    # Places one column before, and lists of one set: slots, or int64 places and two lists of slots for each kept token.
    ordering += num_tokens * 8 + num_kept * 32 if follows else 0
    if scorer.has_kernels:
        return max(ordering, 1)
    # A kept token takes an int64 index, plus a byte for the comparison with its place; a move is two int32 slots.
    moves = 0 if strategy == "remap" else moves_of(strategy, num_kept, num_tokens)
    return ordering + scorer.sets * (num_kept * 9 + moves * 8)
