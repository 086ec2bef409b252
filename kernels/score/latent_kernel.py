"""Triton `score` for latent KV (MLA): one row per token, read once for all query heads; see `reference.score_torch`.

One program scores one chunk of one request's candidates for up to HEADS query heads:

    slots [CHUNK] -> rows [BLOCK, U + 2F] of latents and rotated keys -> [c, |K|, Re K, Im K] . columns -> scores

The rows are the traffic that counts: U + 2F numbers per token (1,152 bytes for DeepSeek-V3 in bfloat16). All heads
share them, so heads are the columns of one matrix product, HEADS at once. The columns are the same for all tokens and
all requests, and come from the cache: instead of the coefficients, the keys are turned, backwards. As in
`score_kernel`, float32 numbers are split into bfloat16 parts whose sum is exact; the columns are stored in such parts
(`latent_columns`). "max" takes fewer heads at once, because the 17 offsets need accumulators of their own; the rows are
then read again, from the cache.

Scores, moments and newest tokens are as in `score_kernel`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.pools import FLOAT8, KeyPools
from sglang_triattn.kernels.score.latent_tuning import check_latents, latent_columns, launch_settings
from sglang_triattn.kernels.score.parts import (
    dot_columns,
    load_dims,
    load_keys,
    turn_back,
)
from sglang_triattn.kernels.score.reference import CHUNK, phase_rows
from sglang_triattn.kernels.score.score_kernel import made
from sglang_triattn.kernels.score.tables import ScoreTables, check_fits
from sglang_triattn.kernels.score.tuning import ALIGN, has_warpgroups


class LatentKernel:
    """`latent_kernel` for some layers of one model, with all arguments that no round changes.

    Args:
        pools: from `key_pools`, of latents [num_slots, 1, U + 2F], with `tables.rotary_start` U.
        aggregation: as for `score_triton`.
        columns: from `latent_columns`, made here where None.

    Raises:
        ValueError: `check_fits` or `check_latents` refuses.
    """

    def __init__(
        self,
        pools: KeyPools,
        tables: ScoreTables,
        aggregation: str = "mean",
        columns: torch.Tensor | None = None,
    ) -> None:
        check_fits(pools.buffers, tables, aggregation)
        check_latents(pools.buffers[0], tables)
        layers, q_heads, frequencies = tables.spread.shape
        pool, start = pools.buffers[0], tables.rotary_start
        settings = launch_settings(pool.dtype, q_heads, tables.style, aggregation, has_warpgroups(pool))
        split = triton.cdiv(q_heads, settings["GP"])
        self._launch = Launcher(latent_kernel, settings)
        self._programs = layers * split
        self._pools = pools
        self._columns = latent_columns(tables, aggregation) if columns is None else columns
        self._heads = (q_heads, self._columns.shape[-1] // ALIGN, split)
        others = 0 if aggregation == "norm" else start // ALIGN
        self._widths = (frequencies // ALIGN, start // ALIGN, others, pool.stride(0) // ALIGN)
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
        """As `ScoreKernel.score`."""
        requests, num_tokens = slots.shape
        self._launch(
            (self._programs, -(-num_tokens // CHUNK), requests),
            self._pools.addresses,
            self._pools.scales,
            slots,
            lengths,
            phases,
            self._columns,
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


def score_latents_triton(
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
    """As `score_triton`, for a pool of latents [num_slots, 1, U + 2F], with `tables.rotary_start` U.

    Raises:
        ValueError: `check_fits` or `check_latents` refuses.
    """
    kernel = LatentKernel(pools, tables, aggregation)
    scores, moments = made(slots, tables, scores, moments)
    phases = phase_rows(tables, next_positions, aggregation)
    kernel.score(slots.to(torch.int32), lengths, phases, recent, scores, moments)
    return scores, moments


# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(23)))
def latent_kernel(
    addresses,  # [L] int64
    scales,  # [L]
    slots,  # [R, N]
    lengths,  # [R]
    phases,  # [R, O, 2, F]
    columns,  # [L, 3, U + 3F, width] bfloat16
    scores,  # [R, L, H_q, N]
    moments,  # [R, L, H_q, C, 2]
    heads,
    width,
    split,
    num_tokens,
    recent,
    frequencies,
    rotary_start,
    others,
    stride_slot,
    stride_row,
    offsets,
    shift,
    limit,
    factor,
    beyond,
    KIND: tl.constexpr,
    FT: tl.constexpr,
    UT: tl.constexpr,
    GP: tl.constexpr,
    MAX: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (L * split, C, R); see the module's docstring.

    `split` programs share a row, GP query heads each. `frequencies`, `rotary_start`, `others` (the latent dims that are
    scored, all or none) and `stride_slot` count ALIGN elements. FT frequencies and UT latent dims are multiplied at
    once. `shift` to `beyond` decode float8.
    """
    PARTS: tl.constexpr = 3 if KIND == "fp32" else (2 if KIND == "fp16" else 1)  # pyright: ignore[reportAssignmentType]
    # Of sizes and turned keys, which are float32 numbers whatever the pool holds.
    ALL: tl.constexpr = 3  # pyright: ignore[reportAssignmentType]
    i_ls, i_c, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_l, first = i_ls // split, (i_ls % split) * GP
    F, U = frequencies * ALIGN, others * ALIGN
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent

    o_g = first + tl.arange(0, GP)
    m_g = o_g < heads
    p_phases = phases + i_r * offsets * 2 * F
    S = rotary_start * ALIGN
    W = width * ALIGN
    part = (S + 3 * F) * W
    p_columns = tl.multiple_of(columns, 16) + i_l.to(tl.int64) * (3 * part) + first
    if KIND == "bf16":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.bfloat16))
    elif KIND == "fp16":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.float16))
    elif KIND == "fp32":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.float32))
    else:
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.uint8))
    p_pool = tl.multiple_of(p_pool, 16)
    scale = tl.load(scales + i_l)

    # [GP], rows of the results.
    i_row = (i_r * (tl.num_programs(0) // split) + i_l) * heads + o_g
    b_count = tl.zeros([], tl.float32)
    b_mean = tl.zeros([GP], tl.float32)
    b_square = tl.zeros([GP], tl.float32)
    for start in range(i_c * CHUNK, tl.minimum(i_c * CHUNK + CHUNK, candidates), BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < candidates
        i_slot = tl.load(slots + i_r * stride_row + o_n, mask=m_n, other=0).to(tl.int64)
        p_row = p_pool + i_slot[:, None] * (stride_slot * ALIGN)
        p_key = p_row + rotary_start * ALIGN
        b_acc = tl.zeros([BLOCK, GP], tl.float32)
        for tile in range(tl.cdiv(U, UT)):
            o_u = tile * UT + tl.arange(0, UT)
            m_u = o_u < U
            b_latent = load_dims(p_row, m_n, o_u, m_u, shift, limit, factor, beyond, KIND)
            b_acc = dot_columns(b_latent, p_columns, o_u, m_u, W, part, b_acc, PARTS, WIDEN)
        for tile in range(tl.cdiv(F, FT)):
            o_f = tile * FT + tl.arange(0, FT)
            m_f = o_f < F
            b_kre, b_kim = load_keys(p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED)
            b_size = tl.sqrt(b_kre * b_kre + b_kim * b_kim)
            b_acc = dot_columns(b_size, p_columns, S + o_f, m_f, W, part, b_acc, ALL, WIDEN)
            if not MAX:
                b_kre, b_kim = turn_back(p_phases, b_kre, b_kim, o_f, m_f, F)
                b_acc = dot_columns(b_kre, p_columns, S + F + o_f, m_f, W, part, b_acc, ALL, WIDEN)
                b_acc = dot_columns(b_kim, p_columns, S + 2 * F + o_f, m_f, W, part, b_acc, ALL, WIDEN)
        if MAX:
            b_score = tl.full([BLOCK, GP], float("-inf"), tl.float32)
            for i_o in range(offsets):
                b_trig = b_acc
                for tile in range(tl.cdiv(F, FT)):
                    o_f = tile * FT + tl.arange(0, FT)
                    m_f = o_f < F
                    b_kre, b_kim = load_keys(
                        p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED
                    )
                    b_kre, b_kim = turn_back(p_phases + i_o * 2 * F, b_kre, b_kim, o_f, m_f, F)
                    b_trig = dot_columns(b_kre, p_columns, S + F + o_f, m_f, W, part, b_trig, ALL, WIDEN)
                    b_trig = dot_columns(b_kim, p_columns, S + 2 * F + o_f, m_f, W, part, b_trig, ALL, WIDEN)
                b_score = tl.maximum(b_score, b_trig, propagate_nan=tl.PropagateNan.ALL)
        else:
            b_score = b_acc
        b_score *= scale
        p_score = scores + i_row[None, :] * num_tokens + o_n[:, None]
        tl.store(p_score, b_score, mask=m_n[:, None] & m_g[None, :])

        # Mean and squared deviations so far, joined with the block's (Chan et al.).
        b_new = tl.minimum(candidates - start, BLOCK).to(tl.float32)
        b_mid = tl.sum(tl.where(m_n[:, None], b_score, 0.0), axis=0) / b_new
        b_off = tl.where(m_n[:, None], b_score - b_mid[None, :], 0.0)
        b_gap = b_mid - b_mean
        b_total = b_count + b_new
        b_mean += b_gap * (b_new / b_total)
        b_square += tl.sum(b_off * b_off, axis=0) + b_gap * b_gap * (b_count * b_new / b_total)
        b_count = b_total
    p_moment = moments + (i_row * tl.num_programs(1) + i_c) * 2
    tl.store(p_moment, b_mean, mask=m_g)
    tl.store(p_moment + 1, b_square, mask=m_g)
