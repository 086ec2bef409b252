"""The device's part of a round: score, select, then permute the row or move K/V, for requests that share a launch.

Requests do not see one another, so they are processed in slices: intermediate results stay below SLICE_BYTES, however
many requests are due at once. The plan that sized the KV pool does not count these results.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from sglang_triattn.kernels.compact.reference import moves_of, remap, unchanged_start
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.scorer import Scorer

SLICE_BYTES = 64 << 20
"""Device memory of a slice on top of what the Scorer holds, unless a single request needs more."""


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
    follower: Mover | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Brings the kept tokens of R requests into the private slots that the requests keep; the host never waits.

    Args:
        mover: needed unless `strategy` is "remap".
        slots, lengths, next_positions, num_kept, recent: as for `Scorer.keep`.
        strategy: "remap", "slide" or "fill", see `compact`.
        cut: for "fill", as for `list_moves`; the caller removes the emptied stretch from the row.
        follower: moves the K/V of a model that is not scored, in slots of the same numbers; None if there is none.

    Returns:
        unchanged: [R] int64, leading private tokens of each request that stay where they are.
        ordered: [R, N] like `slots`, the rows as ordered by `remap`; None if K/V was moved instead.

    Raises:
        ValueError: the strategy is unknown, or `Scorer.keep` raises.
    """
    unchanged = torch.empty_like(lengths)
    ordered = torch.empty_like(slots) if strategy == "remap" else None
    for rows in slices(len(slots), request_bytes(scorer.sets, num_kept, slots.shape[1], strategy)):
        kept = scorer.keep(slots[rows], lengths[rows], next_positions[rows], num_kept, recent)
        first = unchanged_start(kept)
        # At the cut, another token always moves up.
        unchanged[rows] = first if cut is None else first.clamp_max(cut)
        if ordered is not None:
            ordered[rows] = remap(slots[rows], kept)
        else:
            cast(Mover, mover).move(slots[rows], kept, strategy, cut=cut, lengths=lengths[rows])
            if follower is not None:
                follower.move(slots[rows], one_set(kept), strategy, cut=cut, lengths=lengths[rows])
        # Released here, so that it never coexists with the next slice's.
        del kept
    return unchanged, ordered


def one_set(kept: torch.Tensor) -> torch.Tensor:
    """[R, num_kept]: the kept set of each request that all heads of another model follow, whose own have none.

    Any would do, as long as it is one: each slot then holds K/V of one token. It is that of the last layer's first
    head.
    """
    while kept.ndim > 2:
        kept = kept[:, -1] if kept.ndim == 4 else kept[:, 0]
    return kept.contiguous()


def request_bytes(sets: int, num_kept: int, num_tokens: int, strategy: str) -> int:
    """Bytes that one request needs between scoring and moving when the kernels run.

    Args:
        sets: kept sets per request.
        num_tokens: private tokens of the longest request of the launch.

    Raises:
        ValueError: the strategy is unknown.
    """
    # A kept token takes an int64 index, plus a byte for the comparison with its place.
    held = sets * num_kept * 9
    if strategy == "remap":
        # Four int64 and two bytes per private token: places of kept and evicted tokens are counted separately.
        return held + num_tokens * 42
    # A move is two int32 slots.
    return held + sets * moves_of(strategy, num_kept, num_tokens) * 8


def slices(requests: int, each: int) -> Iterator[slice]:
    """Slices of about equal size that fit into SLICE_BYTES at `each` bytes per request; at least one request each."""
    count = -(-requests // max(1, SLICE_BYTES // each))
    for part in range(count):
        yield slice(requests * part // count, requests * (part + 1) // count)
