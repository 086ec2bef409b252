"""Triton `list_moves`: lists which K/V a round copies where, for all kept sets at once; see `reference.list_moves`.

One program lists the moves of one kept set. The hole of rank q comes after the kept tokens that have at most q holes
before them; `kept[i] - i`, the number of holes before kept token i, never decreases, so a binary search counts them.
"fill" skips the holes of the columns that it empties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.compact.reference import moves_of
from sglang_triattn.kernels.launcher import Launcher

BLOCK = 512
"""Moves per program."""


class MovesKernel:
    """`moves_kernel` for kept sets of any number and length."""

    def __init__(self) -> None:
        self._launchers = {ordered: Launcher(moves_kernel, moves_settings(ordered)) for ordered in (False, True)}

    def list_moves(
        self,
        slots: torch.Tensor,
        kept: torch.Tensor,
        ordered: bool,
        cut: int,
        lengths: torch.Tensor,
        sources: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Fills `sources` and `targets`, which are as `list_moves_triton` returns them and not empty.

        Args:
            slots: [R, N] int32; kept: [R, ..., num_kept] int32; both contiguous.
            ordered: True for "slide".
            cut, lengths: as for `list_moves`, but not None.
        """
        requests, num_tokens = slots.shape
        num_kept, moves = kept.shape[-1], sources.shape[-1]
        self._launchers[ordered](
            (-(-moves // BLOCK), kept.numel() // (requests * num_kept), requests),
            slots,
            kept,
            lengths,
            sources,
            targets,
            num_tokens,
            num_kept,
            cut,
            moves,
            num_kept.bit_length(),
        )


def list_moves_triton(
    slots: torch.Tensor,
    kept: torch.Tensor,
    strategy: str,
    *,
    cut: int | None = None,
    lengths: torch.Tensor | None = None,
    lists: tuple[torch.Tensor, torch.Tensor] | None = None,
    kernel: MovesKernel | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Lists the copies that bring each kept set into the private slots that its request keeps.

    Args:
        slots: [R, N] int32, private slots of each request in row order, right-padded with valid slots.
        kept: [R, num_kept], [R, H_kv, num_kept] or [R, L, H_kv, num_kept] int32, ascending indices into them.
            Int64 tensors are copied to int32.
        strategy: "slide" or "fill".
        cut, lengths: as for `list_moves`.
        lists: sources and targets to fill; made where None.
        kernel: what launches; made where None.

    Returns:
        sources, targets: [R, ..., M] int32, as `list_moves` defines them.

    Raises:
        ValueError: the strategy is unknown.
    """
    num_tokens, num_kept = slots.shape[1], kept.shape[-1]
    moves = moves_of(strategy, num_kept, num_tokens)
    # One integer type, so that there is one compiled kernel; no pool has 2^31 slots.
    slots, kept = slots.to(torch.int32).contiguous(), kept.to(torch.int32).contiguous()
    if lists is None:
        lists = slots.new_empty((*kept.shape[:-1], moves)), slots.new_empty((*kept.shape[:-1], moves))
    if moves:
        if lengths is None:
            lengths = kept.new_full((len(slots),), num_tokens, dtype=torch.int64)
        kernel = kernel or MovesKernel()
        place = num_kept if cut is None else cut
        kernel.list_moves(slots, kept, strategy == "slide", place, lengths.contiguous(), *lists)
    return lists


def moves_settings(ordered: bool) -> dict:
    """Compile-time arguments of `moves_kernel`; `ordered` for "slide"."""
    return {"ORDERED": ordered, "BLOCK": BLOCK, "num_warps": 8}


@triton.jit
def _count(p_kept, num_kept, steps, b_most, SLOPE: tl.constexpr):
    """For each of b_most: how many kept tokens i have kept[i] - SLOPE * i <= it; the first ones, for that rises."""
    b_low = tl.zeros_like(b_most)
    b_high = b_low + num_kept
    for _ in range(steps):
        b_mid = (b_low + b_high) // 2
        m_open = b_low < b_high
        b_value = tl.load(p_kept + b_mid, mask=m_open, other=0).to(tl.int32) - SLOPE * b_mid
        m_above = m_open & (b_value <= b_most)
        b_high = tl.where(m_open & (b_value > b_most), b_mid, b_high)
        b_low = tl.where(m_above, b_mid + 1, b_low)
    return b_low


# Triton turns numbers into constexpr, which pyright does not know.
# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(10)))
def moves_kernel(
    slots,  # [R, N]
    kept,  # [R, S, num_kept]
    lengths,  # [R]
    sources,  # [R, S, M]
    targets,  # [R, S, M]
    num_tokens,
    num_kept,
    cut,
    moves,
    steps,
    ORDERED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(M / BLOCK), S, R); `steps` halvings leave nothing of `num_kept`."""
    i_r = tl.program_id(2).to(tl.int64)
    i_set = i_r * tl.num_programs(1) + tl.program_id(1)
    p_kept = kept + i_set * num_kept
    o_m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m_m = o_m < moves
    emptied = tl.load(lengths + i_r).to(tl.int32) - num_kept
    if ORDERED:
        # Tokens that go to the right come last, and from the last one on.
        b_rank = tl.where(o_m < cut, o_m, cut + num_kept - 1 - o_m)
        b_source = tl.load(p_kept + b_rank, mask=m_m, other=0)
        b_target = tl.where(o_m < cut, b_rank, b_rank + emptied)
    else:
        # Kept tokens of the emptied columns go to the holes of the others, in order.
        b_end = tl.zeros_like(o_m) + cut
        b_first = _count(p_kept, num_kept, steps, b_end - 1, 0)  # pyright: ignore[reportArgumentType]
        b_behind = _count(p_kept, num_kept, steps, b_end + emptied - 1, 0)  # pyright: ignore[reportArgumentType]
        b_which = b_first + o_m
        m_move = m_m & (b_which < b_behind)
        b_hole = tl.where(o_m < cut - b_first, o_m, o_m + emptied - (b_behind - b_first))
        b_source = tl.load(p_kept + b_which, mask=m_move, other=0)
        b_target = tl.where(m_move, b_hole + _count(p_kept, num_kept, steps, b_hole, 1), 0)  # pyright: ignore[reportArgumentType]
    p_slot = slots + i_r * num_tokens
    p_move = i_set * moves + o_m
    tl.store(sources + p_move, tl.load(p_slot + b_source, mask=m_m, other=0), mask=m_m)
    tl.store(targets + p_move, tl.load(p_slot + b_target, mask=m_m, other=0), mask=m_m)
