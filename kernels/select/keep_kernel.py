"""Triton `keep`: the most important candidates and the newest tokens, ascending; see `reference.keep_torch`.

One program makes one kept set. Floats become unsigned integers of the same order; four histograms of eight bits each,
from the highest down, find the lowest integer that is still kept and how many of its ties are. A last pass writes the
indices in token order: the place of each is a running sum, so the result comes out sorted, and the oldest of several
ties come first. Integer sums are the same in any order, so runs cannot differ.

The same kernel finds the first token that a set drops, and marks the candidates with the largest values in the
importance by which the others are then chosen.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher

BLOCK = 4096
"""Rows of at most this many tokens are read once and stay in registers."""

LONG_BLOCK = 2048
"""Tokens of a longer row that are read at once."""


class KeepKernel:
    """`keep_kernel` for rows of any length."""

    def __init__(self) -> None:
        # By (whether a row stays in registers, whether to mark).
        self._launchers = {
            (single, mark): Launcher(keep_kernel, keep_settings(BLOCK if single else BLOCK + 1, mark))
            for single in (False, True)
            for mark in (False, True)
        }

    def keep(
        self,
        importance: torch.Tensor,
        lengths: torch.Tensor,
        num_kept: int,
        recent: int,
        kept: torch.Tensor,
        holes: torch.Tensor,
    ) -> None:
        """Fills `kept` as `keep_triton` returns it, and `holes`; raises what that raises.

        Args:
            importance, lengths, num_kept, recent: as for `keep_triton`.
            holes: [R, S] int32: tokens of each set before the first one that it drops.
        """
        requests, sets, num_tokens = importance.shape
        if not 0 <= recent <= num_kept <= num_tokens:
            raise ValueError(f"need 0 <= recent <= num_kept <= {num_tokens}, got recent {recent}, num_kept {num_kept}")
        launch = self._launchers[num_tokens <= BLOCK, False]
        launch((sets, requests, 1), importance, lengths, kept, holes, importance, num_tokens, num_kept, recent)

    def mark(
        self, sizes: torch.Tensor, lengths: torch.Tensor, count: int, recent: int, importance: torch.Tensor
    ) -> None:
        """Sets `importance` [R, S, N] float32 to infinity at the `count` candidates with the largest `sizes`.

        Args:
            sizes: as `importance` for `keep_triton`.
            lengths, recent: as for `keep_triton`; there must be `count` candidates or more.
        """
        requests, sets, num_tokens = sizes.shape
        launch = self._launchers[num_tokens <= BLOCK, True]
        # Nothing is written to the two that stand for kept sets and holes.
        unused = importance.view(torch.int32)
        launch((sets, requests, 1), sizes, lengths, unused, unused, importance, num_tokens, count + recent, recent)


def keep_triton(importance: torch.Tensor, lengths: torch.Tensor, num_kept: int, recent: int) -> torch.Tensor:
    """The `num_kept - recent` most important candidates and the newest `recent` tokens.

    Args:
        importance: [R, S, N] float32; columns from `lengths[r] - recent` on are never used. NaN counts as largest.
        lengths: [R] int64, private tokens of each request, each at least `num_kept`.

    Returns:
        [R, S, num_kept] int32, ascending.

    Raises:
        ValueError: unless 0 <= recent <= num_kept <= N.
    """
    kept = lengths.new_empty((*importance.shape[:2], num_kept), dtype=torch.int32)
    KeepKernel().keep(importance, lengths, num_kept, recent, kept, torch.empty_like(kept[..., 0]))
    return kept


def keep_settings(num_tokens: int, mark: bool = False) -> dict:
    """Compile-time arguments of `keep_kernel` for rows of `num_tokens` tokens."""
    single = num_tokens <= BLOCK
    return {"SINGLE": single, "MARK": mark, "BLOCK": BLOCK if single else LONG_BLOCK, "num_warps": 8}


@triton.jit
def _ordered(p_row, o_n, candidates):
    """Importance as uint32 of the same order, NaN largest; 0 for tokens that are no candidates."""
    m_n = o_n < candidates
    b_x = tl.load(p_row + o_n, mask=m_n, other=0.0)
    # -0.0 and 0.0 are a tie.
    b_bits = tl.where(b_x == 0.0, 0.0, b_x).to(tl.uint32, bitcast=True)
    b_order = tl.where(b_bits >= 0x80000000, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)
    b_order = tl.where(b_x != b_x, 0xFFFFFFFF, b_order)
    return tl.where(m_n, b_order, 0)


# The type errors noted at `score_kernel` apply; Triton's declarations of `static_range` and `sum` are wrong as well.
# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(8)))
def keep_kernel(
    importance,  # [R, S, N]
    lengths,  # [R]
    kept,  # [R, S, num_kept]
    holes,  # [R, S]
    marks,  # [R, S, N]
    num_tokens,
    num_kept,
    recent,
    SINGLE: tl.constexpr,
    MARK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (S, R). If MARK, writes infinity to `marks` for each candidate that stays, and nothing else."""
    i_row = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    length = tl.load(lengths + tl.program_id(1)).to(tl.int32)
    candidates, chosen = length - recent, num_kept - recent
    p_row = importance + i_row * num_tokens
    p_kept = kept + i_row * num_kept
    o_b = tl.arange(0, BLOCK)
    o_bin = tl.arange(0, 256)
    if SINGLE:
        b_order = _ordered(p_row, o_b, candidates)

    # The kept integer of rank `need` begins with `prefix`; `need` counts within those that do.
    prefix = tl.zeros([], tl.uint32)
    need = tl.maximum(chosen, 1)
    for digit in tl.static_range(4):  # pyright: ignore[reportGeneralTypeIssues]
        b_count = tl.zeros([256], tl.int32)
        for start in range(0, candidates, BLOCK):
            if not SINGLE:
                b_order = _ordered(p_row, start + o_b, candidates)
            m_n = start + o_b < candidates
            if digit > 0:
                m_n = m_n & ((b_order >> (32 - 8 * digit)) == prefix)  # pyright: ignore[reportPossiblyUnboundVariable]
            b_digit = ((b_order >> (24 - 8 * digit)) & 0xFF).to(tl.int32)  # pyright: ignore[reportPossiblyUnboundVariable]
            b_count += tl.histogram(b_digit, 256, mask=m_n)
        b_above = tl.sum(b_count, axis=0) - tl.cumsum(b_count, axis=0)  # [256], in higher bins
        # Falls with the bin: so many bins have enough in them and above them.
        here = tl.sum((b_above + b_count >= need).to(tl.int32), axis=0) - 1  # pyright: ignore[reportOperatorIssue]
        need -= tl.sum(tl.where(o_bin > here, b_count, 0), axis=0)
        prefix = (prefix << 8) | here.to(tl.uint32)

    taken = tl.zeros([], tl.int32)
    ties = tl.zeros([], tl.int32)
    same = tl.zeros([], tl.int32)
    for start in range(0, candidates, BLOCK):
        if not SINGLE:
            b_order = _ordered(p_row, start + o_b, candidates)
        m_n = (start + o_b < candidates) & (chosen > 0)
        b_tie = ((b_order == prefix) & m_n).to(tl.int32)  # pyright: ignore[reportPossiblyUnboundVariable]
        m_take = m_n & ((b_order > prefix) | ((b_tie > 0) & (ties + tl.cumsum(b_tie, axis=0) <= need)))  # pyright: ignore[reportPossiblyUnboundVariable]
        if MARK:
            tl.store(marks + i_row * num_tokens + start + o_b, float("inf"), mask=m_take)
        else:
            b_take = m_take.to(tl.int32)
            o_place = taken + tl.cumsum(b_take, axis=0) - 1
            tl.store(p_kept + o_place, start + o_b, mask=m_take & (o_place < chosen))
            taken += tl.sum(b_take, axis=0)
            # Before the first hole every kept token is in its place, and none beyond it.
            same += tl.sum((m_take & (o_place == start + o_b)).to(tl.int32), axis=0)
        ties += tl.sum(b_tie, axis=0)
    if not MARK:
        for start in range(0, recent, BLOCK):
            o_new = start + o_b
            tl.store(p_kept + chosen + o_new, candidates + o_new, mask=o_new < recent)
        # Without a hole among the candidates, the newest are in their places, too.
        tl.store(holes + i_row, tl.where(same < candidates, same, num_kept))
