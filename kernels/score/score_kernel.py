"""Triton `score`: every due request, layer and query head in one launch; see `reference.score_torch`.

One program scores one chunk of one request's candidates for all query heads of one KV head:

    slots [CHUNK] -> keys [BLOCK, 2F + U], read once from the paged pool -> [Re K, Im K, |K|, K_u] . columns -> scores

A query head is one column of a matrix product, so the cost hardly depends on how many heads share the key. More than
HEADS of them are spread over adjacent programs, which find the keys in the cache. Tensor cores multiply bfloat16
without loss and add in float32; float32 numbers are therefore split into three bfloat16 parts whose sum is exact, and
the result is as good as a float32 product. No key is widened in memory, gathered or repeated. Only "max" limits a
program to four query heads: 17 offsets cost far more than reading the keys again.

A model whose RoPE turns every dim (U = 0) has a kernel without the unrotated part. Layers without RoPE run the same
kernel as the others: their phases are taken as cos 1 and sin 0.

The newest tokens stay at any score, so their keys are not read.

Each program also reduces its scores to a mean and a sum of squared deviations, which `importance_triton` merges in a
fixed order: no atomics, the same bits in every run, and no request's result depends on the batch around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.pools import FLOAT8, KeyPools
from sglang_triattn.kernels.score.parts import (
    dot,
    joined_block,
    load_coefficients,
    load_columns,
    load_dims,
    load_keys,
    pool_pointer,
    turned,
)
from sglang_triattn.kernels.score.reference import CHUNK, phase_rows
from sglang_triattn.kernels.score.tables import ScoreTables, check_fits
from sglang_triattn.kernels.score.tuning import ALIGN, has_warpgroups, launch_settings


class ScoreKernel:
    """`score_kernel` for some layers of one model, with all arguments that no round changes.

    Args:
        pools: from `key_pools`, of the layers of `tables`.
        aggregation: "mean", "max" or "norm", see `score_torch`.

    Raises:
        ValueError: `check_fits` refuses.
    """

    def __init__(self, pools: KeyPools, tables: ScoreTables, aggregation: str = "mean") -> None:
        check_fits(pools.buffers, tables, aggregation)
        layers, q_heads, frequencies = tables.spread.shape
        group, pool = q_heads // tables.num_kv_heads, pools.buffers[0]
        # "norm" is without what follows from the mean query: phases of zero drop it in all layers.
        norm = aggregation == "norm"
        others = 0 if norm else tables.unrotated.shape[-1]
        steps = (frequencies, others, pool.stride(0), pool.stride(1))
        aligned = not any(step % ALIGN for step in steps)
        warpgroups = has_warpgroups(pool)
        settings = launch_settings(
            pool.dtype, frequencies, group, tables.style, aggregation, aligned, warpgroups, others
        )
        split, align = triton.cdiv(group, settings["GP"]), settings["ALIGN"]
        self._launch = Launcher(score_kernel, settings)
        self._programs = layers * tables.num_kv_heads * split
        self._pools = pools
        self._model = (
            torch.view_as_real(tables.mean if aggregation == "max" else tables.center),
            tables.spread,
            tables.unrotated,
            torch.ones_like(tables.rotates) if norm else tables.rotates,
        )
        self._heads = (tables.num_kv_heads, group, split)
        self._widths = tuple(step // align for step in steps)
        self._float8 = FLOAT8.get(pool.dtype, (0, 0, 0.0, 0.0))

    def score(
        self,
        slots: torch.Tensor,
        lengths: torch.Tensor,
        phases: torch.Tensor,
        recent: int,
        scores: torch.Tensor,
        moments: torch.Tensor,
    ) -> None:
        """Fills `scores` and `moments`, which are as `score_triton` returns them.

        Args:
            slots: [R, N] int32, rows of adjacent elements; lengths: [R] int64; recent: as for `score_triton`.
            phases: [R, O, 2, F] float32, from `phase_rows`.
        """
        requests, num_tokens = slots.shape
        self._launch(
            (self._programs, -(-num_tokens // CHUNK), requests),
            self._pools.addresses,
            self._pools.scales,
            slots,
            lengths,
            phases,
            *self._model,
            scores,
            moments,
            *self._heads,
            num_tokens,
            recent,
            *self._widths,
            slots.stride(0),
            phases.shape[1],
            *self._float8,
        )


def score_triton(
    pools: KeyPools,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    next_positions: torch.Tensor,
    tables: ScoreTables,
    recent: int,
    *,
    aggregation: str = "mean",
    scores: torch.Tensor | None = None,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of the candidates of R requests in all layers and query heads; higher is more important.

    Args:
        pools: from `key_pools`.
        slots: [R, N] int32, private slots of each request in row order; columns from `lengths[r]` on are never used.
            An int64 tensor is copied to int32.
        lengths: [R] int64, private tokens of each request.
        next_positions: [R] int64, logical position of each request's next token.
        recent: newest tokens of each request, which are not candidates.
        aggregation: "mean", "max" or "norm", see `score_torch`.
        scores, moments: float32 tensors to fill, allocated where None.

    Returns:
        scores [R, L, H_q, N] float32, only the candidates' columns written; moments [R, L, H_q, C, 2] float32 with
        C = ceil(N / CHUNK): mean of the chunk's candidates and their sum of squared deviations from it.

    Raises:
        ValueError: `check_fits` refuses.
    """
    kernel = ScoreKernel(pools, tables, aggregation)
    scores, moments = made(slots, tables, scores, moments)
    phases = phase_rows(tables, next_positions, aggregation)
    # One integer type, so that there is one compiled kernel; no pool has 2^31 slots.
    kernel.score(slots.to(torch.int32), lengths, phases, recent, scores, moments)
    return scores, moments


def made(
    slots: torch.Tensor, tables: ScoreTables, scores: torch.Tensor | None, moments: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and moments to fill for `slots` [R, N], shaped as `score_triton` returns them; made where None."""
    requests, num_tokens = slots.shape
    rows = (requests, *tables.spread.shape[:2])
    if scores is None:
        scores = slots.new_empty((*rows, num_tokens), dtype=torch.float32)
    if moments is None:
        moments = slots.new_empty((*rows, -(-num_tokens // CHUNK), 2), dtype=torch.float32)
    return scores, moments


# A name bound in a constexpr branch is bound wherever it is read, and Triton turns numbers into constexpr: pyright
# knows neither.
# Nothing is specialised on a run-time value, so what is compiled ahead of time is what is launched.
@triton.jit(do_not_specialize=list(range(26)))
def score_kernel(
    addresses,  # [L] int64
    scales,  # [L]
    slots,  # [R, N]
    lengths,  # [R]
    phases,  # [R, O, 2, F]
    coefficients,  # [L, H_q, F, 2]
    spread,  # [L, H_q, F]
    unrotated,  # [L, H_q, U]
    rotates,  # [L]
    scores,  # [R, L, H_q, N]
    moments,  # [R, L, H_q, C, 2]
    kv_heads,
    group,
    split,
    num_tokens,
    recent,
    frequencies,
    others,
    stride_slot,
    stride_head,
    stride_row,
    offsets,
    shift,
    limit,
    factor,
    beyond,
    KIND: tl.constexpr,
    FT: tl.constexpr,
    TILED: tl.constexpr,
    UT: tl.constexpr,
    HELD: tl.constexpr,
    GP: tl.constexpr,
    MAX: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (L * H_kv * split, C, R); see the module's docstring.

    `split` programs share a KV head, GP query heads each. `frequencies`, `others` (U), `stride_slot` and `stride_head`
    count ALIGN elements. UT unrotated dims, 0 if there are none, are multiplied at once, by columns that stay
    in registers if HELD. `shift` to `beyond` decode float8.
    """
    PARTS: tl.constexpr = 3 if KIND == "fp32" else (2 if KIND == "fp16" else 1)  # pyright: ignore[reportAssignmentType]
    NC: tl.constexpr = 4 * GP
    i_ljs, i_c, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_lj, first = i_ljs // split, (i_ljs % split) * GP
    i_l, i_j = i_lj // kv_heads, i_lj % kv_heads
    F, U = frequencies * ALIGN, others * ALIGN
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent

    # Columns 4 g .. 4 g + 3 belong to the group's query head first + g.
    o_c = tl.arange(0, NC)
    b_part = (o_c % 4)[None, :]
    i_h = i_lj * group + first + o_c // 4
    m_h = first + o_c // 4 < group
    p_phases = phases + i_r * offsets * 2 * F
    turning = tl.load(rotates + i_l).to(tl.int32) * F
    if not TILED:
        # One tile holds all frequencies: what does not change with the keys stays in registers.
        o_f = tl.arange(0, FT)
        m_f = o_f < F
        b_re, b_im = load_coefficients(coefficients, o_f, m_f, i_h, m_h, F)
        b_size = load_columns(spread, o_f, m_f, i_h, m_h, b_part, F)
        if not MAX:
            b_vre, b_vim = turned(p_phases, b_re, b_im, o_f, turning, b_part, F)
    if HELD:
        # So do those of the unrotated dims.
        o_u = tl.arange(0, UT)
        m_u = o_u < U
        b_mu = load_columns(unrotated, o_u, m_u, i_h, m_h, b_part, U)

    p_pool = pool_pointer(addresses, i_l, KIND) + i_j.to(tl.int64) * (stride_head * ALIGN)
    scale = tl.load(scales + i_l)

    o_g = first + tl.arange(0, GP)
    m_g = o_g < group
    # [GP], rows of the results.
    i_row = (i_r * (tl.num_programs(0) // split) + i_lj) * group + o_g
    b_count = tl.zeros([], tl.float32)
    b_mean = tl.zeros([GP], tl.float32)
    b_square = tl.zeros([GP], tl.float32)
    for start in range(i_c * CHUNK, tl.minimum(i_c * CHUNK + CHUNK, candidates), BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < candidates
        b_slot = tl.load(slots + i_r * stride_row + o_n, mask=m_n, other=0).to(tl.int64)
        p_key = p_pool + b_slot[:, None] * ALIGN * stride_slot

        b_acc = tl.zeros([BLOCK, NC], tl.float32)
        if not TILED:
            b_kre, b_kim = load_keys(p_key, m_n, o_f, m_f, 0, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED)  # pyright: ignore[reportPossiblyUnboundVariable]
            b_acc = dot(tl.sqrt(b_kre * b_kre + b_kim * b_kim), b_size, b_acc, 3, WIDEN)  # pyright: ignore[reportArgumentType, reportPossiblyUnboundVariable]
            if not MAX:
                b_acc = dot(b_kre, b_vre, b_acc, PARTS, WIDEN)  # pyright: ignore[reportPossiblyUnboundVariable]
                b_acc = dot(b_kim, b_vim, b_acc, PARTS, WIDEN)  # pyright: ignore[reportPossiblyUnboundVariable]
        else:
            for tile in range(tl.cdiv(F, FT)):
                o_f = tile * FT + tl.arange(0, FT)
                m_f = o_f < F
                b_kre, b_kim = load_keys(
                    p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED
                )
                b_size = load_columns(spread, o_f, m_f, i_h, m_h, b_part, F)
                b_acc = dot(tl.sqrt(b_kre * b_kre + b_kim * b_kim), b_size, b_acc, 3, WIDEN)  # pyright: ignore[reportArgumentType]
                if not MAX:
                    b_re, b_im = load_coefficients(coefficients, o_f, m_f, i_h, m_h, F)
                    b_vre, b_vim = turned(p_phases, b_re, b_im, o_f, turning, b_part, F)
                    b_acc = dot(b_kre, b_vre, b_acc, PARTS, WIDEN)
                    b_acc = dot(b_kim, b_vim, b_acc, PARTS, WIDEN)
        # Added once, before any maximum over offsets.
        if HELD:
            b_key = load_dims(p_key + 2 * F, m_n, o_u, m_u, shift, limit, factor, beyond, KIND)  # pyright: ignore[reportPossiblyUnboundVariable]
            b_acc = dot(b_key, b_mu, b_acc, PARTS, WIDEN)  # pyright: ignore[reportPossiblyUnboundVariable]
        elif UT:
            for tile in range(tl.cdiv(U, UT)):
                o_u = tile * UT + tl.arange(0, UT)
                m_u = o_u < U
                b_mu = load_columns(unrotated, o_u, m_u, i_h, m_h, b_part, U)
                b_key = load_dims(p_key + 2 * F, m_n, o_u, m_u, shift, limit, factor, beyond, KIND)
                b_acc = dot(b_key, b_mu, b_acc, PARTS, WIDEN)
        if MAX:
            b_score = tl.full([BLOCK, GP], float("-inf"), tl.float32)
            for i_o in range(offsets):
                p_unit = p_phases + i_o * 2 * F
                b_trig = b_acc
                if not TILED:
                    b_vre, b_vim = turned(p_unit, b_re, b_im, o_f, turning, b_part, F)  # pyright: ignore[reportPossiblyUnboundVariable]
                    b_trig = dot(b_kre, b_vre, b_trig, PARTS, WIDEN)  # pyright: ignore[reportPossiblyUnboundVariable]
                    b_trig = dot(b_kim, b_vim, b_trig, PARTS, WIDEN)  # pyright: ignore[reportPossiblyUnboundVariable]
                else:
                    # The block's keys do not fit in registers beside this; they come from the cache again.
                    for tile in range(tl.cdiv(F, FT)):
                        o_f = tile * FT + tl.arange(0, FT)
                        m_f = o_f < F
                        b_re, b_im = load_coefficients(coefficients, o_f, m_f, i_h, m_h, F)
                        b_vre, b_vim = turned(p_unit, b_re, b_im, o_f, turning, b_part, F)
                        b_kre, b_kim = load_keys(
                            p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED
                        )
                        b_trig = dot(b_kre, b_vre, b_trig, PARTS, WIDEN)
                        b_trig = dot(b_kim, b_vim, b_trig, PARTS, WIDEN)
                b_trig = tl.sum(tl.reshape(b_trig, [BLOCK, GP, 4]), axis=2)
                b_score = tl.maximum(b_score, b_trig, propagate_nan=tl.PropagateNan.ALL)
        else:
            b_score = tl.sum(tl.reshape(b_acc, [BLOCK, GP, 4]), axis=2)  # [BLOCK, GP]
        b_score *= scale
        p_score = scores + i_row[None, :] * num_tokens + o_n[:, None]
        tl.store(p_score, b_score, mask=m_n[:, None] & m_g[None, :])

        b_new = tl.minimum(candidates - start, BLOCK).to(tl.float32)
        b_count, b_mean, b_square = joined_block(b_count, b_mean, b_square, b_score, m_n, b_new)
    p_moment = moments + (i_row * tl.num_programs(1) + i_c) * 2
    tl.store(p_moment, b_mean, mask=m_g)
    tl.store(p_moment + 1, b_square, mask=m_g)
