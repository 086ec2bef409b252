"""Triton `importance`: raw scores become one importance per token and kept set; twin: `select.importance_naive`.

Two kernels. `scale_kernel` joins each row's partial sums from `score_triton` into its mean and 1 / deviation, in the
order of the chunks. `importance_kernel` standardises and merges: one program owns a block of tokens of one kept set,
walks all rows that decide about it and reads each score once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.score import CHUNK
from sglang_triattn.kernels.select import MIN_STD, kept_sets

ROWS = 16
"""Rows read at once where all of a request's rows decide together."""

TOKENS = 128
"""Tokens of one program."""

SCALE_ROWS = 128


def importance_triton(
    scores: torch.Tensor,
    moments: torch.Tensor,
    lengths: torch.Tensor,
    recent: int,
    *,
    selection: str,
    num_kv_heads: int,
    scales: torch.Tensor | None = None,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Importance of each candidate, as `importance_naive` defines it.

    Args:
        scores, moments: from `score_triton`, with the same `recent`.
        lengths: [R] int64, private tokens of each request.
        scales: [R, L, H_q, 2] float32 scratch, allocated where None.
        importance: [R, S, N] float32 to fill, allocated where None; S is `kept_sets(...)`.

    Returns:
        [R, S, N] float32; only the candidates' columns are written.
    """
    requests, layers, q_heads, columns = scores.shape
    sets = kept_sets(selection, layers, num_kv_heads)
    chunks, rows = moments.shape[3], layers * q_heads
    if scales is None:
        scales = torch.empty_like(moments[..., 0, :])
    if importance is None:
        importance = scores.new_empty((requests, sets, columns))
    grid = (triton.cdiv(rows, SCALE_ROWS), requests)
    scale_kernel[grid](moments, lengths, scales, rows, chunks, recent, MIN_STD, CHUNK=CHUNK, BLOCK=SCALE_ROWS)
    group = q_heads // num_kv_heads
    importance_kernel[(triton.cdiv(columns, TOKENS), sets, requests)](
        scores,
        scales,
        lengths,
        importance,
        rows,
        q_heads if selection == "per-head" else rows,
        group,
        columns,
        recent,
        **importance_settings(selection, group),
    )
    return importance


def importance_settings(selection: str, group: int) -> dict:
    """Compile-time arguments of `importance_kernel` for one selection."""
    grouped = selection in ("per-head", "per-layer-head")
    return {
        "MODE": "grouped" if grouped else {"union": "max", "shared-mean": "mean"}[selection],
        "ROWS": triton.next_power_of_2(group) if grouped else ROWS,
        "TOKENS": TOKENS,
        "num_warps": 4,
    }


@triton.jit
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
        b_gap = tl.load(p_moment, mask=m_row, other=0.0) - b_mean
        b_total = b_count + b_new
        b_mean += b_gap * (b_new / b_total)
        b_square += tl.load(p_moment + 1, mask=m_row, other=0.0) + b_gap * b_gap * (b_count * b_new / b_total)
        b_count = b_total
    b_std = tl.sqrt(b_square / tl.maximum(b_count, 1.0))
    # A NaN stays one: a maximum would hide it behind the lower bound.
    b_std = tl.where(b_std < min_std, min_std, b_std)
    tl.store(scales + i_row * 2, b_mean, mask=m_row)
    tl.store(scales + i_row * 2 + 1, 1.0 / b_std, mask=m_row)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def importance_kernel(
    scores,  # [R, rows, N]
    scales,  # [R, rows, 2]
    lengths,  # [R]
    importance,  # [R, S, N]
    rows,
    stride_outer,
    group,
    columns,
    recent,
    MODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (ceil(N / TOKENS), S, R).

    MODE "max" and "mean" merge all rows. "grouped" takes the maximum over `group` adjacent rows, from row S * group on,
    and the mean over those at every `stride_outer` rows.
    """
    i_n, i_s, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent
    o_n = i_n * TOKENS + tl.arange(0, TOKENS)
    m_n = o_n < candidates
    if i_n * TOKENS >= candidates:
        return
    o_row = tl.arange(0, ROWS)
    if MODE == "grouped":
        first, width, step = i_s * group, group, stride_outer
        b_sum = tl.zeros([TOKENS], tl.float32)
    else:
        first, width, step = 0, rows, ROWS
        b_all = tl.full([ROWS, TOKENS], 0.0 if MODE == "mean" else float("-inf"), tl.float32)
    for start in range(first, rows, step):
        m_row = o_row < width if MODE == "grouped" else start + o_row < width
        i_row = i_r * rows + start + o_row
        b_mean = tl.load(scales + i_row * 2, mask=m_row, other=0.0)
        b_factor = tl.load(scales + i_row * 2 + 1, mask=m_row, other=0.0)
        p_score = scores + i_row[:, None] * columns + o_n[None, :]
        m_score = m_row[:, None] & m_n[None, :]
        b_z = (tl.load(p_score, mask=m_score, other=0.0) - b_mean[:, None]) * b_factor[:, None]  # [ROWS, TOKENS]
        if MODE == "mean":
            b_all += b_z
        else:
            b_z = tl.where(m_row[:, None], b_z, float("-inf"))
            if MODE == "max":
                b_all = _larger(b_all, b_z)
            else:
                b_sum += tl.reduce(b_z, 0, _larger)
    if MODE == "mean":
        b_result = tl.sum(b_all, axis=0) / rows
    elif MODE == "max":
        b_result = tl.reduce(b_all, 0, _larger)
    else:
        b_result = b_sum / tl.cdiv(rows - first, step)
    tl.store(importance + (i_r * tl.num_programs(1) + i_s) * columns + o_n, b_result, mask=m_n)
