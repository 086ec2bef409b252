"""The device's part of a round: score, select, then permute the row or move K/V, for requests that share a launch.

Requests do not see one another, so they go slice by slice: what is held between the steps stays below SLICE_BYTES,
however many requests are due at once. Nothing of it is in the plan by which the KV pool was sized.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from sglang_triattn.kernels.compact.reference import moves_of, remap, unchanged_start
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.scorer import Scorer

SLICE_BYTES = 64 << 20
"""Device memory of a slice beside what the Scorer holds, unless a single request needs more."""


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
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Brings the kept tokens of R requests to the private slots that these keep; the host never waits.

    Args:
        mover: needed unless `strategy` is "remap".
        slots, lengths, next_positions, num_kept, recent: as for `Scorer.keep`.
        strategy: "remap", "slide" or "fill", see `compact`.
        cut: for "fill", as for `list_moves`: the caller takes what is emptied out of the row.

    Returns:
        unchanged: [R] int64, private tokens of each request that stay where they are before the first that does not.
        ordered: [R, N] as `slots`, the rows as `remap` orders them; None where K/V was moved instead.

    Raises ValueError on an unknown strategy, and where `Scorer.keep` does.
    """
    unchanged = torch.empty_like(lengths)
    ordered = torch.empty_like(slots) if strategy == "remap" else None
    for rows in slices(len(slots), request_bytes(scorer.sets, num_kept, slots.shape[1], strategy)):
        kept = scorer.keep(slots[rows], lengths[rows], next_positions[rows], num_kept, recent)
        first = unchanged_start(kept)
        # Another token moves up to where the row is cut, whatever was there.
        unchanged[rows] = first if cut is None else first.clamp_max(cut)
        if ordered is not None:
            ordered[rows] = remap(slots[rows], kept)
        else:
            cast(Mover, mover).move(slots[rows], kept, strategy, cut=cut, lengths=lengths[rows])
        # Not beside the next slice's.
        del kept
    return unchanged, ordered


def request_bytes(sets: int, num_kept: int, num_tokens: int, strategy: str) -> int:
    """Bytes that the kernels' way takes for one request between scores and moves.

    Args:
        sets: kept sets of a request.
        num_tokens: private tokens of the longest request of the launch.

    Raises ValueError on an unknown strategy.
    """
    # A kept token is an int64 index, compared with its place into a byte.
    held = sets * num_kept * 9
    if strategy == "remap":
        # Four int64 and two bytes for each private token: places of kept and evicted ones are counted apart.
        return held + num_tokens * 42
    # A move is two int32 slots.
    return held + sets * moves_of(strategy, num_kept, num_tokens) * 8


def slices(requests: int, each: int) -> Iterator[slice]:
    """Slices of about equal size whose requests need `each` bytes and fit into SLICE_BYTES, of one at least."""
    count = -(-requests // max(1, SLICE_BYTES // each))
    for part in range(count):
        yield slice(requests * part // count, requests * (part + 1) // count)
