"""Building blocks of the kernels: loading, decoding, rotating, products without rounding loss, and running moments."""

import triton
import triton.language as tl


# Triton declares `static_range` without the methods of an iterator.
@triton.jit
def dot(b_x, b_v, b_acc, PARTS: tl.constexpr, WIDEN: tl.constexpr):
    """b_acc + b_x . b_v for float32 b_x, cut into bfloat16 PARTS whose sum is exact."""
    for part in tl.static_range(PARTS):  # pyright: ignore[reportGeneralTypeIssues]
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
def dot_columns(b_x, p_columns, o_d, m_d, W, part, b_acc, PARTS: tl.constexpr, WIDEN: tl.constexpr):
    """b_acc + b_x . v for float32 b_x and the first columns of v [dims, W] at o_d: three bfloat16 parts, each `part`
    elements behind the one before."""
    o_g = tl.arange(0, b_acc.shape[1])
    for i_p in tl.static_range(3):  # pyright: ignore[reportGeneralTypeIssues]
        p_v = p_columns + i_p * part + o_d[:, None] * W + o_g[None, :]
        b_acc = dot(b_x, tl.load(p_v, mask=m_d[:, None], other=0.0), b_acc, PARTS, WIDEN)
    return b_acc


@triton.jit
def split_columns(b_x, b_part):
    """The bfloat16 part of float32 b_x [FT, NC] that each column holds: high, middle, low, zero."""
    b_high = (b_x.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_rest = b_x - b_high
    b_middle = (b_rest.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    b_low = b_rest - b_middle
    b_x = tl.where(b_part == 0, b_high, tl.where(b_part == 1, b_middle, tl.where(b_part == 2, b_low, 0.0)))
    return b_x.to(tl.bfloat16)


@triton.jit
def decode(b_x, shift, limit, factor, beyond, KIND: tl.constexpr):
    """Stored keys or values as float32; float8 comes as bytes, the other arguments are its entry in `FLOAT8`."""
    if KIND == "fp8":
        b_bits = b_x.to(tl.uint32)
        b_size = b_bits & 0x7F
        # Sign, exponent and mantissa put where float32 has them; the factor mends the exponent's bias.
        b_bits = ((b_bits & 0x80) << 24) | (b_size << shift)
        b_value = b_bits.to(tl.float32, bitcast=True) * factor
        b_value = tl.where(b_size >= limit, b_value * beyond, b_value)
        b_value = tl.where(b_size > limit, float("nan"), b_value)
    else:
        b_value = b_x.to(tl.float32)
    return b_value


@triton.jit
def turn_back(p_phases, b_kre, b_kim, o_f, m_f, F):
    """Re and Im of keys [BLOCK, FT], turned back by the phase of one position: that, or turning the coefficients
    forward, gives the same product."""
    b_cos = tl.load(p_phases + o_f, mask=m_f, other=0.0)[None, :]
    b_sin = tl.load(p_phases + F + o_f, mask=m_f, other=0.0)[None, :]
    return b_kre * b_cos + b_kim * b_sin, b_kim * b_cos - b_kre * b_sin


@triton.jit
def turned(p_phases, b_re, b_im, o_f, turning, b_part, F):
    """The columns [FT, NC] of Re v and Im v: coefficients times the unit of one position.

    `turning` is F, or 0 in a layer without RoPE, where the unit is 1.
    """
    b_cos = tl.load(p_phases + o_f, mask=o_f < turning, other=1.0)[:, None]
    b_sin = tl.load(p_phases + F + o_f, mask=o_f < turning, other=0.0)[:, None]
    return split_columns(b_re * b_cos - b_im * b_sin, b_part), split_columns(b_re * b_sin + b_im * b_cos, b_part)


@triton.jit
def load_coefficients(p_model, o_f, m_f, i_h, m_h, F):
    """Re mu and Im mu [FT, NC] of the query head of each column."""
    o_v = 2 * (i_h[None, :] * F + o_f[:, None])
    m_v = m_f[:, None] & m_h[None, :]
    return tl.load(p_model + o_v, mask=m_v, other=0.0), tl.load(p_model + o_v + 1, mask=m_v, other=0.0)


@triton.jit
def load_columns(p_x, o_d, m_d, i_h, m_h, b_part, D):
    """The columns [tile, NC] of b, or of the mean query in unrotated dims: float32 [H_q, D] at dims o_d."""
    b_x = tl.load(p_x + i_h[None, :] * D + o_d[:, None], mask=m_d[:, None] & m_h[None, :], other=0.0)
    return split_columns(b_x, b_part)


@triton.jit
def load_keys(p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond,
          FT: tl.constexpr, KIND: tl.constexpr, INTERLEAVED: tl.constexpr):  # fmt: skip
    """Re K and Im K [BLOCK, FT] float32 of one tile of frequencies."""
    if INTERLEAVED:
        o_x = 2 * tile * FT + tl.arange(0, 2 * FT)
        b_pair = tl.load(p_key + o_x[None, :], mask=m_n[:, None] & (o_x < 2 * F)[None, :], other=0)
        b_re, b_im = tl.split(tl.reshape(b_pair, [b_pair.shape[0], FT, 2]))
    else:
        m_key = m_n[:, None] & m_f[None, :]
        b_re = tl.load(p_key + o_f[None, :], mask=m_key, other=0)
        b_im = tl.load(p_key + F + o_f[None, :], mask=m_key, other=0)
    return decode(b_re, shift, limit, factor, beyond, KIND), decode(b_im, shift, limit, factor, beyond, KIND)


@triton.jit
def load_dims(p_key, m_n, o_d, m_d, shift, limit, factor, beyond, KIND: tl.constexpr):
    """K [BLOCK, tile] float32 at dims o_d."""
    b_key = tl.load(p_key + o_d[None, :], mask=m_n[:, None] & m_d[None, :], other=0)
    return decode(b_key, shift, limit, factor, beyond, KIND)


@triton.jit
def pool_pointer(addresses, i_l, KIND: tl.constexpr):
    """Where the pool of layer i_l begins; float8 is read as bytes."""
    address = tl.load(addresses + i_l)
    if KIND == "bf16":
        p_pool = address.to(tl.pointer_type(tl.bfloat16))
    elif KIND == "fp16":
        p_pool = address.to(tl.pointer_type(tl.float16))
    elif KIND == "fp32":
        p_pool = address.to(tl.pointer_type(tl.float32))
    else:
        p_pool = address.to(tl.pointer_type(tl.uint8))
    return tl.multiple_of(p_pool, 16)


@triton.jit
def joined(b_count, b_mean, b_square, b_new, b_mid, b_rest):
    """Count, mean and sum of squared deviations of two sets of numbers together (Chan et al.), the second one not
    empty: `b_new` numbers with mean `b_mid` and squared deviations `b_rest`."""
    b_gap = b_mid - b_mean
    b_total = b_count + b_new
    b_mean += b_gap * (b_new / b_total)
    b_square += b_rest + b_gap * b_gap * (b_count * b_new / b_total)
    return b_total, b_mean, b_square


@triton.jit
def joined_block(b_count, b_mean, b_square, b_score, m_n, b_new):
    """`joined` with the `b_new` rows of b_score [BLOCK, GP] that m_n names, for each column."""
    b_mid = tl.sum(tl.where(m_n[:, None], b_score, 0.0), axis=0) / b_new
    b_off = tl.where(m_n[:, None], b_score - b_mid[None, :], 0.0)
    return joined(b_count, b_mean, b_square, b_new, b_mid, tl.sum(b_off * b_off, axis=0))
