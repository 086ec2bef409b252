"""Triton `score`: every due request, layer and query head in one launch; twin: `score.score_naive`.

One program scores one chunk of one request's private tokens with all query heads of one KV head:

    slots [CHUNK] -> keys [BLOCK, 2F], read once from the paged pool -> [Re K, Im K, |K|] . columns -> scores

A query head is one column of a matrix product, so its cost hardly depends on how many heads share the key. Tensor
cores multiply bfloat16 without loss and add in float32; float32 numbers are therefore split into three bfloat16 parts
whose sum is exact, and the result is as good as a float32 product. No key is widened in memory, gathered or repeated.

Each program also reduces its scores to a mean and a sum of squared deviations, which `select_triton` merges in a fixed
order: no atomics, equal bits in every run, and nothing of a request depends on the batch around it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.key_pools import KINDS, KeyPools
from sglang_triattn.kernels.score import AGGREGATIONS, CHUNK, OFFSETS, ScoreTables

BLOCK = 64
"""Tokens in flight at once: the rows of one Hopper tensor-core instruction."""

MAX_GROUP = 16
MAX_FREQUENCIES = 128

MAX_TILE = 64
"""Most frequencies held in registers at once; larger heads are read in tiles."""


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
    """Scores of the private tokens of R requests in all layers and query heads; higher is more important.

    Args:
        pools: from `key_pools`.
        slots: [R, N] int32 or int64, private slots of each request in row order; columns from `lengths[r]` on are
            never used.
        lengths: [R] int64, private tokens of each request.
        next_positions: [R] int64, logical position of each request's next token.
        recent: newest tokens of each request that are no candidates: scored, but not part of `moments`.
        aggregation: "mean", "max" or "norm", see `score_naive`.
        scores, moments: float32 tensors to fill, allocated where None.

    Returns:
        scores [R, L, H_q, N] float32, columns from `lengths[r]` on unwritten; moments [R, L, H_q, C, 2] float32 with
        C = ceil(N / CHUNK): mean of the chunk's candidates and their sum of squared deviations from it.

    Raises ValueError on an unknown aggregation, a wrong number of pools or a model beyond the kernel's limits.
    """
    layers, q_heads, frequencies = tables.spread.shape
    group = q_heads // tables.num_kv_heads
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {AGGREGATIONS}, got {aggregation!r}")
    if len(pools.buffers) != layers:
        raise ValueError(f"the statistics cover {layers} layers, got {len(pools.buffers)} key buffers")
    if group > MAX_GROUP or frequencies > MAX_FREQUENCIES:
        raise ValueError(
            f"at most {MAX_GROUP} query heads per KV head and {MAX_FREQUENCIES} frequencies, got {group}, {frequencies}"
        )
    requests, columns = slots.shape
    chunks = triton.cdiv(columns, CHUNK)
    if scores is None:
        scores = slots.new_empty((requests, layers, q_heads, columns), dtype=torch.float32)
    if moments is None:
        moments = slots.new_empty((requests, layers, q_heads, chunks, 2), dtype=torch.float32)
    pool = pools.buffers[0]
    units = phase_units(tables, next_positions, aggregation)
    settings = launch_settings(pool.dtype, frequencies, group, tables.style, aggregation)
    score_kernel[(layers * tables.num_kv_heads, chunks, requests)](
        pools.addresses,
        pools.scales,
        slots,
        lengths,
        units,
        torch.view_as_real(tables.mean if aggregation == "max" else tables.center),
        tables.spread,
        scores,
        moments,
        tables.num_kv_heads,
        group,
        columns,
        recent,
        pool.stride(0),
        pool.stride(1),
        slots.stride(0),
        units.shape[1],
        **settings,
    )
    return scores, moments


def launch_settings(dtype: torch.dtype, frequencies: int, group: int, style: str, aggregation: str) -> dict:
    """Compile-time arguments of `score_kernel` and how it is launched, for one model and key dtype."""
    padded = max(16, triton.next_power_of_2(frequencies))
    columns = max(4, triton.next_power_of_2(group))
    # With 64 rows these would spill registers. Fewer rows also keep Triton 3.8 off Blackwell's tensor memory, where it
    # cannot compile the loop over offsets.
    large, offsets, wide = padded > MAX_TILE, aggregation == "max", dtype.itemsize == 4
    if large or (columns == 16 and (offsets or dtype.itemsize != 2)):
        rows = 16
    else:
        rows = 32 if offsets or dtype.itemsize == 1 else BLOCK
    tile = (16 if offsets and dtype.itemsize == 2 else 32) if large else padded
    return {
        "KIND": KINDS[dtype],
        "F": frequencies,
        "FT": tile,
        "TILES": padded // tile,
        "GP": columns,
        "MAX": offsets,
        "INTERLEAVED": style == "interleaved",
        "BLOCK": rows,
        "CHUNK": CHUNK,
        "WIDEN": triton.knobs.runtime.interpret,
        "num_warps": 8 if not large and (offsets or (wide and rows == 16)) else 4,
        "num_stages": 2 if padded * dtype.itemsize > 128 else 3,
        # Left alone, ptxas trades a few spills for more resident programs here.
        "maxnreg": 255 if large else None,
    }


def phase_units(tables: ScoreTables, next_positions: torch.Tensor, aggregation: str) -> torch.Tensor:
    """[R, O, 2, F] float32: cos and sin of the phases that queries stand at, computed in float64.

    O is 1, for "max" one per offset. For "norm" they are zero, which leaves the trigonometric term out.
    """
    positions = next_positions.to(torch.float64)[:, None]
    if aggregation == "max":
        positions = positions + torch.tensor(OFFSETS, dtype=torch.float64).to(positions.device, non_blocking=True)
    angles = positions[..., None] * tables.inv_freq
    units = torch.stack([angles.cos(), angles.sin()], dim=2).float()
    return torch.zeros_like(units) if aggregation == "norm" else units


@triton.jit
def _dot(b_x, b_v, b_acc, PARTS: tl.constexpr, WIDEN: tl.constexpr):
    """b_acc + b_x . b_v for float32 b_x, cut into bfloat16 PARTS whose sum is exact."""
    for part in tl.static_range(PARTS):
        if part < PARTS - 1:
            b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
        else:
            b_high = b_x
        if WIDEN:
            # Triton's interpreter cannot multiply bfloat16; these numbers are, but in the last part of a split
            # that is never rounded.
            b_acc = tl.dot(b_high, b_v.to(tl.float32), b_acc, input_precision="ieee")
        else:
            b_acc = tl.dot(b_high.to(tl.bfloat16), b_v, b_acc)
        b_x = b_x - b_high
    return b_acc


@triton.jit
def _columns(b_x, b_part):
    """The bfloat16 part of float32 b_x [FT, NC] that each column holds: high, middle, low, zero."""
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_rest = b_x - b_high
    b_middle = (b_rest.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_low = b_rest - b_middle
    b_x = tl.where(b_part == 0, b_high, tl.where(b_part == 1, b_middle, tl.where(b_part == 2, b_low, 0.0)))
    return b_x.to(tl.bfloat16)


@triton.jit
def _decode(b_x, KIND: tl.constexpr):
    """Stored keys as float32; float8 comes as bytes."""
    if KIND == "e4m3":
        b_bits = b_x.to(tl.uint32)
        b_size = b_bits & 0x7F
        # Sign, exponent and mantissa put where float32 has them; its exponent is biased by 120 more.
        b_bits = ((b_bits & 0x80) << 24) | (b_size << 20)
        b_value = b_bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
        b_value = tl.where(b_size == 0x7F, float("nan"), b_value)
    elif KIND == "e5m2":
        # float16 cut after its first byte.
        b_value = (b_x.to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        b_value = b_x.to(tl.float32)
    return b_value


@triton.jit
def _turned(p_units, b_re, b_im, o_f, m_f, b_part, F: tl.constexpr):
    """The columns [FT, NC] of Re v and Im v: coefficients times the unit of one position."""
    b_cos = tl.load(p_units + o_f, mask=m_f, other=0.0)[:, None]
    b_sin = tl.load(p_units + F + o_f, mask=m_f, other=0.0)[:, None]
    return _columns(b_re * b_cos - b_im * b_sin, b_part), _columns(b_re * b_sin + b_im * b_cos, b_part)


@triton.jit
def _coefficients(p_model, o_f, m_f, i_h, m_h, F: tl.constexpr):
    """Re mu and Im mu [FT, NC] of the query head of each column."""
    o_v = 2 * (i_h[None, :] * F + o_f[:, None])
    m_v = m_f[:, None] & m_h[None, :]
    return tl.load(p_model + o_v, mask=m_v, other=0.0), tl.load(p_model + o_v + 1, mask=m_v, other=0.0)


@triton.jit
def _spread(p_spread, o_f, m_f, i_h, m_h, b_part, F: tl.constexpr):
    """The columns [FT, NC] of b."""
    b_size = tl.load(p_spread + i_h[None, :] * F + o_f[:, None], mask=m_f[:, None] & m_h[None, :], other=0.0)
    return _columns(b_size, b_part)


@triton.jit
def _keys(p_key, m_n, o_f, m_f, tile, F: tl.constexpr, FT: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Re K and Im K [BLOCK, FT] float32 of one tile of frequencies."""
    if INTERLEAVED:
        o_x = 2 * tile * FT + tl.arange(0, 2 * FT)
        b_pair = tl.load(p_key + o_x[None, :], mask=m_n[:, None] & (o_x < 2 * F)[None, :], other=0)
        b_re, b_im = tl.split(tl.reshape(b_pair, [b_pair.shape[0], FT, 2]))
    else:
        m_key = m_n[:, None] & m_f[None, :]
        b_re = tl.load(p_key + o_f[None, :], mask=m_key, other=0)
        b_im = tl.load(p_key + F + o_f[None, :], mask=m_key, other=0)
    return _decode(b_re, KIND), _decode(b_im, KIND)


@triton.jit
def score_kernel(
    addresses,  # [L] int64
    scales,  # [L]
    slots,  # [R, N]
    lengths,  # [R]
    units,  # [R, O, 2, F]
    coefficients,  # [L, H_q, F, 2]
    spread,  # [L, H_q, F]
    scores,  # [R, L, H_q, N]
    moments,  # [R, L, H_q, C, 2]
    kv_heads,
    group,
    columns,
    recent,
    stride_slot,
    stride_head,
    stride_row,
    offsets,
    KIND: tl.constexpr,
    F: tl.constexpr,
    FT: tl.constexpr,
    TILES: tl.constexpr,
    GP: tl.constexpr,
    MAX: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """Grid (L * H_kv, C, R); see the module's docstring."""
    PARTS: tl.constexpr = 3 if KIND == "fp32" else (2 if KIND == "fp16" else 1)
    NC: tl.constexpr = 4 * GP
    i_lj, i_c, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_l, i_j = i_lj // kv_heads, i_lj % kv_heads
    length = tl.load(lengths + i_r).to(tl.int32)
    candidates = length - recent

    # Columns 4 g .. 4 g + 3 belong to the group's query head g.
    o_c = tl.arange(0, NC)
    b_part = (o_c % 4)[None, :]
    i_h = (i_l * kv_heads + i_j) * group + o_c // 4
    m_h = o_c // 4 < group
    p_units = units + i_r * offsets * 2 * F
    if TILES == 1:
        # One tile holds all frequencies: what does not change with the keys stays in registers.
        o_f = tl.arange(0, FT)
        m_f = o_f < F
        b_re, b_im = _coefficients(coefficients, o_f, m_f, i_h, m_h, F)
        b_size = _spread(spread, o_f, m_f, i_h, m_h, b_part, F)
        if not MAX:
            b_vre, b_vim = _turned(p_units, b_re, b_im, o_f, m_f, b_part, F)

    if KIND == "bf16":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.bfloat16))
    elif KIND == "fp16":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.float16))
    elif KIND == "fp32":
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.float32))
    else:
        p_pool = tl.load(addresses + i_l).to(tl.pointer_type(tl.uint8))
    p_pool = tl.multiple_of(p_pool, 16) + i_j.to(tl.int64) * stride_head
    scale = tl.load(scales + i_l)

    o_g = tl.arange(0, GP)
    m_g = o_g < group
    # [GP], rows of the results.
    i_row = (i_r * (tl.num_programs(0) // kv_heads) + i_l) * kv_heads * group + i_j * group + o_g
    b_count = tl.zeros([], tl.float32)
    b_mean = tl.zeros([GP], tl.float32)
    b_square = tl.zeros([GP], tl.float32)
    for start in range(i_c * CHUNK, tl.minimum(i_c * CHUNK + CHUNK, length), BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < length
        b_slot = tl.load(slots + i_r * stride_row + o_n, mask=m_n, other=0).to(tl.int64)
        p_key = p_pool + b_slot[:, None] * stride_slot

        b_acc = tl.zeros([BLOCK, NC], tl.float32)
        if TILES == 1:
            b_kre, b_kim = _keys(p_key, m_n, o_f, m_f, 0, F, FT, KIND, INTERLEAVED)
            b_acc = _dot(tl.sqrt(b_kre * b_kre + b_kim * b_kim), b_size, b_acc, 3, WIDEN)
            if not MAX:
                b_acc = _dot(b_kre, b_vre, b_acc, PARTS, WIDEN)
                b_acc = _dot(b_kim, b_vim, b_acc, PARTS, WIDEN)
        else:
            for tile in range(TILES):
                o_f = tile * FT + tl.arange(0, FT)
                m_f = o_f < F
                b_kre, b_kim = _keys(p_key, m_n, o_f, m_f, tile, F, FT, KIND, INTERLEAVED)
                b_size = _spread(spread, o_f, m_f, i_h, m_h, b_part, F)
                b_acc = _dot(tl.sqrt(b_kre * b_kre + b_kim * b_kim), b_size, b_acc, 3, WIDEN)
                if not MAX:
                    b_re, b_im = _coefficients(coefficients, o_f, m_f, i_h, m_h, F)
                    b_vre, b_vim = _turned(p_units, b_re, b_im, o_f, m_f, b_part, F)
                    b_acc = _dot(b_kre, b_vre, b_acc, PARTS, WIDEN)
                    b_acc = _dot(b_kim, b_vim, b_acc, PARTS, WIDEN)
        if MAX:
            b_score = tl.full([BLOCK, GP], float("-inf"), tl.float32)
            for i_o in range(offsets):
                p_unit = p_units + i_o * 2 * F
                b_trig = b_acc
                if TILES == 1:
                    b_vre, b_vim = _turned(p_unit, b_re, b_im, o_f, m_f, b_part, F)
                    b_trig = _dot(b_kre, b_vre, b_trig, PARTS, WIDEN)
                    b_trig = _dot(b_kim, b_vim, b_trig, PARTS, WIDEN)
                else:
                    # The block's keys do not fit in registers beside this; they come from the cache again.
                    for tile in range(TILES):
                        o_f = tile * FT + tl.arange(0, FT)
                        m_f = o_f < F
                        b_re, b_im = _coefficients(coefficients, o_f, m_f, i_h, m_h, F)
                        b_vre, b_vim = _turned(p_unit, b_re, b_im, o_f, m_f, b_part, F)
                        b_kre, b_kim = _keys(p_key, m_n, o_f, m_f, tile, F, FT, KIND, INTERLEAVED)
                        b_trig = _dot(b_kre, b_vre, b_trig, PARTS, WIDEN)
                        b_trig = _dot(b_kim, b_vim, b_trig, PARTS, WIDEN)
                b_trig = tl.sum(tl.reshape(b_trig, [BLOCK, GP, 4]), axis=2)
                b_score = tl.maximum(b_score, b_trig, propagate_nan=tl.PropagateNan.ALL)
        else:
            b_score = tl.sum(tl.reshape(b_acc, [BLOCK, GP, 4]), axis=2)  # [BLOCK, GP]
        b_score *= scale
        p_score = scores + i_row[None, :] * columns + o_n[:, None]
        tl.store(p_score, b_score, mask=m_n[:, None] & m_g[None, :])

        # Mean and squared deviations so far, joined with the block's (Chan et al.).
        m_c = (o_n < candidates)[:, None]
        b_new = tl.minimum(tl.maximum(candidates - start, 0), BLOCK).to(tl.float32)
        b_mid = tl.sum(tl.where(m_c, b_score, 0.0), axis=0) / tl.maximum(b_new, 1.0)
        b_off = tl.where(m_c, b_score - b_mid[None, :], 0.0)
        b_gap = b_mid - b_mean
        b_total = tl.maximum(b_count + b_new, 1.0)
        b_mean += tl.where(b_new > 0, b_gap * (b_new / b_total), 0.0)
        b_square += tl.sum(b_off * b_off, axis=0) + b_gap * b_gap * (b_count * b_new / b_total)
        b_count += b_new
    p_moment = moments + (i_row * tl.num_programs(1) + i_c) * 2
    tl.store(p_moment, b_mean, mask=m_g)
    tl.store(p_moment + 1, b_square, mask=m_g)
