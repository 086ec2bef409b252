"""Triton `importance`: raw scores become one importance per token and kept set; see `reference.importance_torch`.

Two kernels. `scale_kernel` joins each row's partial sums from `score_triton` into its mean and 1 / deviation, in chunk
order. `importance_kernel` standardises and merges: one program owns a block of tokens of one kept set, walks all rows
that contribute to it and reads each score once.

Layers may come in several calls if all of them together do not fit into memory. A maximum does not depend on the split,
and means are summed one layer after the other, so the result has the same bits however the layers are split.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.score.parts import joined
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.kernels.select.reference import MIN_STD

ROWS = 16
"""Rows read at once; 4 where a group of query heads has no more."""

TOKENS = 128
"""Tokens per program."""

SCALE_ROWS = 128


class ImportanceKernel:
    """`scale_kernel` and `importance_kernel` for some layers of one model.

    Args:
        layers, q_heads, num_kv_heads: of these layers.
        selection: see `Selection`.
        before, after: how many layers earlier calls have merged into the importance, and later calls will. Sums become
            means in the call with none after it. "per-layer-head" merges nothing and ignores both.
    """

    def __init__(
        self, layers: int, q_heads: int, num_kv_heads: int, selection: str, before: int = 0, after: int = 0
    ) -> None:
        chosen, group = selection_named(selection), q_heads // num_kv_heads
        self.sets = chosen.sets(layers, num_kv_heads)
        alone, mean = chosen.per_layer, chosen.merge == "mean"
        # Rows, or maxima of groups, that a mean is over; 0 for a maximum.
        terms = 0 if alone or chosen.merge == "max" else (q_heads if mean else 1) * (before + layers + after)
        self._rows = layers * q_heads
        self._widths = (self._rows if alone else q_heads, q_heads if mean else group)
        self._merged = (0 if alone else before, terms if terms and not after else 1)
        self._launch_scales = Launcher(scale_kernel, {"CHUNK": CHUNK, "BLOCK": SCALE_ROWS})
        self._launch = Launcher(importance_kernel, importance_settings(selection, group))

    def merge(
        self,
        scores: torch.Tensor,
        moments: torch.Tensor,
        lengths: torch.Tensor,
        recent: int,
        scales: torch.Tensor,
        importance: torch.Tensor,
    ) -> None:
        """Fills `scales` and `importance`; arguments as for `importance_triton`."""
        requests, num_tokens, rows = len(scores), scores.shape[3], self._rows
        grid = (-(-rows // SCALE_ROWS), requests, 1)
        self._launch_scales(grid, moments, lengths, scales, rows, moments.shape[3], recent, MIN_STD)
        self._launch(
            (-(-num_tokens // TOKENS), self.sets, requests),
            scores,
            scales,
            lengths,
            importance,
            rows,
            *self._widths,
            num_tokens,
            recent,
            *self._merged,
        )


def importance_triton(
    scores: torch.Tensor,
    moments: torch.Tensor,
    lengths: torch.Tensor,
    recent: int,
    *,
    selection: str,
    num_kv_heads: int,
    importance: torch.Tensor | None = None,
    before: int = 0,
    after: int = 0,
) -> torch.Tensor:
    """Importance of each candidate, as `importance_torch` defines it.

    Args:
        scores, moments: from `score_triton`, with the same `recent`.
        lengths: [R] int64, private tokens of each request.
        importance: [R, S, N] float32 to fill, allocated where None; S is `Selection.sets`. If `before` is not 0, it
            holds the result of the earlier calls.
        before, after: as for `ImportanceKernel`.

    Returns:
        [R, S, N] float32; only the candidates' columns are written.

    Raises:
        ValueError: there are layers before these, but no `importance`.
    """
    if before and importance is None:
        raise ValueError(f"{before} layers are given as merged, but without their importance")
    requests, layers, q_heads, num_tokens = scores.shape
    kernel = ImportanceKernel(layers, q_heads, num_kv_heads, selection, before, after)
    if importance is None:
        importance = scores.new_empty((requests, kernel.sets, num_tokens))
    kernel.merge(scores, moments, lengths, recent, torch.empty_like(moments[..., 0, :]), importance)
    return importance


def importance_settings(selection: str, group: int) -> dict:
    """Compile-time arguments of `importance_kernel` for one selection."""
    merge = selection_named(selection).merge
    return {
        "MODE": merge,
        "ROWS": 4 if merge == "grouped" and group <= 4 else ROWS,
        "TOKENS": TOKENS,
        "num_warps": 4,
    }


# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(7)))
def scale_kernel(
    moments,  # [R, rows, C, 2]
    lengths,  # [R]
    scales,  # [R, rows, 2]
    rows,
    chunks,
    recent,
    min_std,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (ceil(rows / BLOCK), R)."""
    i_b, i_r = tl.program_id(0), tl.program_id(1).to(tl.int64)
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent
    o_row = i_b * BLOCK + tl.arange(0, BLOCK)
    m_row = o_row < rows
    i_row = i_r * rows + o_row
    b_mean = tl.zeros([BLOCK], tl.float32)
    b_square = tl.zeros([BLOCK], tl.float32)
    b_count = tl.zeros([], tl.float32)
    for i_c in range(tl.minimum(chunks, tl.cdiv(tl.maximum(candidates, 0), CHUNK))):
        b_new = tl.minimum(candidates - i_c * CHUNK, CHUNK).to(tl.float32)
        p_moment = moments + (i_row * chunks + i_c) * 2
        b_mid = tl.load(p_moment, mask=m_row, other=0.0)
        b_rest = tl.load(p_moment + 1, mask=m_row, other=0.0)
        b_count, b_mean, b_square = joined(b_count, b_mean, b_square, b_new, b_mid, b_rest)
    b_std = tl.sqrt(b_square / tl.maximum(b_count, 1.0))
    # A NaN stays one: a maximum would hide it behind the lower bound.
    b_std = tl.where(b_std < min_std, min_std, b_std)
    tl.store(scales + i_row * 2, b_mean, mask=m_row)
    tl.store(scales + i_row * 2 + 1, 1.0 / b_std, mask=m_row)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _standard(scores, scales, i_first, count, o_n, m_n, num_tokens, other, ROWS: tl.constexpr):
    """z-scores [ROWS, TOKENS] of at most `count` rows from `i_first` on, `other` in rows beyond."""
    o_row = tl.arange(0, ROWS)
    m_row = o_row < count
    i_row = i_first + o_row
    b_mean = tl.load(scales + i_row * 2, mask=m_row, other=0.0)
    b_factor = tl.load(scales + i_row * 2 + 1, mask=m_row, other=0.0)
    p_score = scores + i_row[:, None] * num_tokens + o_n[None, :]
    b_score = tl.load(p_score, mask=m_row[:, None] & m_n[None, :], other=0.0)
    return tl.where(m_row[:, None], (b_score - b_mean[:, None]) * b_factor[:, None], other)


@triton.jit(do_not_specialize=list(range(11)))
def importance_kernel(
    scores,  # [R, rows, N]
    scales,  # [R, rows, 2]
    lengths,  # [R]
    importance,  # [R, S, N]
    rows,
    step,
    width,
    num_tokens,
    recent,
    before,
    divisor,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (ceil(N / TOKENS), S, R).

    MODE "max" merges all rows. "mean" adds up all rows, `step` rows of a layer at a time. "grouped" takes the maximum
    over `width` adjacent rows, from row S * width on, and adds up those at every `step` rows. Sums are divided by
    `divisor`.
    """
    i_n, i_s, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent
    o_n = i_n * TOKENS + tl.arange(0, TOKENS)
    m_n = o_n < candidates
    if i_n * TOKENS >= candidates:
        return
    p_result = importance + (i_r * tl.num_programs(1) + i_s) * num_tokens + o_n
    b_result = tl.load(p_result, mask=m_n & (before > 0), other=float("-inf") if MODE == "max" else 0.0)
    if MODE == "max":
        b_all = tl.full([ROWS, TOKENS], float("-inf"), tl.float32)
        for start in range(0, rows, ROWS):
            b_z = _standard(scores, scales, i_r * rows + start, rows - start, o_n, m_n, num_tokens, float("-inf"), ROWS)
            b_all = _larger(b_all, b_z)
        b_result = _larger(b_result, tl.reduce(b_all, 0, _larger))
    elif MODE == "mean":
        for start in range(0, rows, step):
            b_all = tl.zeros([ROWS, TOKENS], tl.float32)
            for row in range(0, width, ROWS):
                b_all += _standard(
                    scores, scales, i_r * rows + start + row, width - row, o_n, m_n, num_tokens, 0.0, ROWS
                )
            b_result += tl.sum(b_all, axis=0)
    else:
        for start in range(i_s * width, rows, step):
            b_all = tl.full([ROWS, TOKENS], float("-inf"), tl.float32)
            for row in range(0, width, ROWS):
                i_first = i_r * rows + start + row
                b_z = _standard(scores, scales, i_first, width - row, o_n, m_n, num_tokens, float("-inf"), ROWS)
                b_all = _larger(b_all, b_z)
            b_result += tl.reduce(b_all, 0, _larger)
    if MODE != "max":
        b_result = b_result / divisor
    tl.store(p_result, b_result, mask=m_n)
