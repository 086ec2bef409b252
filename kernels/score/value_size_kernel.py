"""Triton `value_size`: the sizes of all values of a round in one launch; reference: `value_size.value_size_torch`.

One program handles TOKENS of a request's private tokens in one KV head of one layer. It reads each value, and with
weights each key, once, straight from the paged pool, and writes one number for it. Of the newest tokens, which stay at
any size, it reads only the NEWEST that make up the center; other programs of the row read the same ones from the cache.
Sums run over the row's own values alone, in an order that depends only on their number and dtype, so the batch around a
request cannot change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.pools import FLOAT8, KINDS, KeyPools
from sglang_triattn.kernels.score.parts import decode, load_keys, pool_pointer
from sglang_triattn.kernels.score.value_size import LEAST, LEAST_DIMS, MOST_DIMS, NEWEST, LookUps

ALIGNMENT = 16
"""A head's values must be a multiple of this many bytes, as `move_kernel.check_movable` requires."""

TOKENS = 256
"""Tokens per program."""

NUMBERS_IN_FLIGHT = 4096
"""Numbers of one or two bytes in flight at once; half as many of four bytes."""


TILE = 32
"""Frequencies of a key that are held at once."""


class ValueSizeKernel:
    """`value_size_kernel` for some layers of one model, with all arguments that no round changes.

    Args:
        pools: of values, from `key_pools`; `check_movable` must accept them.
        keys: of keys, of the same dtype; needed by `lookups`.
        lookups: weights of these layers, with which sizes are weighed.
        recency: as for `value_size_torch`.

    Raises:
        ValueError: values have too few or too many dims to be weighed.
    """

    def __init__(
        self,
        pools: KeyPools,
        keys: KeyPools | None = None,
        lookups: LookUps | None = None,
        recency: float = 0.0,
    ) -> None:
        pool = pools.buffers[0]
        heads, width = pool.shape[1:]
        steps, style = (0, 0, 0), "half"
        # Without weights, nothing reads what stands for keys and weights.
        self._keys = (pools.addresses, pools.scales)
        if keys is not None and lookups is not None:
            if not LEAST_DIMS <= width <= MOST_DIMS:
                raise ValueError(f"kernels weigh values of {LEAST_DIMS} to {MOST_DIMS} dims, got {width}")
            key = keys.buffers[0]
            steps, style = (lookups.frequencies(width), key.stride(0), key.stride(1)), lookups.style
            self._keys = (keys.addresses, lookups.weights)
        settings = value_settings(pool.dtype, width, steps, style)
        self._launch = Launcher(value_size_kernel, settings)
        self._pools, self._heads = pools, heads
        self._key_widths = tuple(step // settings["KEY_ALIGN"] for step in steps)
        self._programs = len(pools.buffers) * heads
        self._widths = tuple(each // settings["ALIGN"] for each in (width, pool.stride(0), pool.stride(1)))
        self._float8 = FLOAT8.get(pool.dtype, (0, 0, 0.0, 0.0))
        # Of the squared distance.
        self._power = -2.0 * recency

    def measure(self, slots: torch.Tensor, lengths: torch.Tensor, recent: int, sizes: torch.Tensor) -> None:
        """Fills `sizes`, which are as `value_size_triton` returns them.

        Args:
            slots: [R, N] int32, rows of adjacent elements; lengths: [R] int64; recent: as for `value_size_triton`.
        """
        requests, num_tokens = slots.shape
        self._launch(
            (self._programs, -(-num_tokens // TOKENS), requests),
            self._pools.addresses,
            *self._keys,
            slots,
            lengths,
            sizes,
            self._heads,
            num_tokens,
            recent,
            min(recent, NEWEST),
            *self._widths,
            *self._key_widths,
            slots.stride(0),
            *self._float8,
            self._power,
        )


def value_size_triton(
    pools: KeyPools,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    recent: int,
    *,
    sizes: torch.Tensor | None = None,
    keys: KeyPools | None = None,
    lookups: LookUps | None = None,
    recency: float = 0.0,
) -> torch.Tensor:
    """Squared sizes of the values of R requests in all layers and KV heads; with `lookups` their logarithms, weighed.

    Args:
        pools, keys, lookups, recency: as for `ValueSizeKernel`.
        slots: [R, N] int32, private slots of each request in row order; columns from `lengths[r]` on are never used.
            An int64 tensor is copied to int32.
        lengths: [R] int64, private tokens of each request.
        recent: newest tokens of each request, which are not candidates.
        sizes: [R, L, H_kv, N] float32 to fill, allocated where None.

    Returns:
        [R, L, H_kv, N] float32; only the candidates' columns are written.
    """
    requests, num_tokens = slots.shape
    if sizes is None:
        shape = (requests, len(pools.buffers), pools.buffers[0].shape[1], num_tokens)
        sizes = slots.new_empty(shape, dtype=torch.float32)
    # One integer type, so that there is one compiled kernel; no pool has 2^31 slots.
    ValueSizeKernel(pools, keys, lookups, recency).measure(slots.to(torch.int32), lengths, recent, sizes)
    return sizes


def value_settings(dtype: torch.dtype, width: int, keys: tuple[int, int, int] = (0, 0, 0), style: str = "half") -> dict:
    """Compile-time arguments of `value_size_kernel` for heads of `width` dims.

    Args:
        keys: frequencies of a key, and the strides of a slot and a head in its pool; zeros without weights.
        style: how a key's dims pair up.
    """
    padded, align = triton.next_power_of_2(width), ALIGNMENT // dtype.itemsize
    held = max(padded, 2 * TILE) if keys[0] else padded
    aligned = not any(step % align for step in keys)
    if not aligned and padded > TILE:
        # Each number of a key then has an address of its own in registers. Fewer of the shortest heads would leave a
        # thread less than 16 bytes of values to copy.
        held *= 2
    return {
        "KIND": KINDS[dtype],
        "ALIGN": align,
        "WIDTH": padded,
        "FT": TILE if keys[0] else 0,
        "INTERLEAVED": style == "interleaved",
        "KEY_ALIGN": align if aligned else 1,
        "BLOCK": min(TOKENS, max(1, NUMBERS_IN_FLIGHT * 2 // max(dtype.itemsize, 2) // held)),
        "LEAST": LEAST,
        "TOKENS": TOKENS,
        "num_warps": 4,
    }


# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(22)))
def value_size_kernel(
    addresses,  # [L] int64
    key_addresses,  # [L] int64
    weights,  # [L, H_kv, F + head_dim]
    slots,  # [R, N]
    lengths,  # [R]
    sizes,  # [R, L, H_kv, N]
    heads,
    num_tokens,
    recent,
    sample,
    width,
    stride_slot,
    stride_head,
    frequencies,
    key_slot,
    key_head,
    stride_row,
    shift,
    limit,
    factor,
    beyond,
    power,
    KIND: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    FT: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KEY_ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAST: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (L * H_kv, ceil(N / TOKENS), R).

    `sample` newest tokens make the center. `width`, `stride_slot` and `stride_head` count ALIGN elements,
    `frequencies`, `key_slot` and `key_head` KEY_ALIGN; FT of the frequencies are held at once, and none are read if it
    is 0. `shift` to `beyond` decode float8. A token's rank to the power `power` multiplies its size.
    """
    i_lj, i_t, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_l, i_j = i_lj // heads, i_lj % heads
    candidates = tl.load(lengths + i_r).to(tl.int32) - recent
    p_pool = pool_pointer(addresses, i_l, KIND) + i_j.to(tl.int64) * (stride_head * ALIGN)
    p_size = sizes + (i_r * tl.num_programs(0) + i_lj) * num_tokens
    o_d = tl.arange(0, WIDTH)
    m_d = o_d < width * ALIGN
    p_slot = slots + i_r * stride_row
    b_center = tl.zeros([WIDTH], tl.float32)
    if FT:
        p_keys = pool_pointer(key_addresses, i_l, KIND) + i_j.to(tl.int64) * (key_head * KEY_ALIGN)
        F = frequencies * KEY_ALIGN
        p_weight = weights + i_lj * (F + width * ALIGN)
        # Twice the weights, as the logarithm is of a squared distance.
        b_value_weight = 2 * tl.load(p_weight + F + o_d, mask=m_d, other=0.0)
    # Programs behind the candidates have nothing to do.
    sample = tl.where(i_t * TOKENS < candidates, sample, 0)
    for start in range(0, sample, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < sample
        b_slot = tl.load(p_slot + candidates + recent - sample + o_n, mask=m_n, other=0).to(tl.int64)
        p_value = p_pool + b_slot[:, None] * ALIGN * stride_slot + o_d[None, :]
        b_value = decode(
            tl.load(p_value, mask=m_n[:, None] & m_d[None, :], other=0), shift, limit, factor, beyond, KIND
        )
        b_center += tl.sum(b_value, axis=0)
    b_center = b_center / tl.maximum(sample, 1)
    for start in range(i_t * TOKENS, tl.minimum(i_t * TOKENS + TOKENS, candidates), BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < candidates
        b_slot = tl.load(p_slot + o_n, mask=m_n, other=0).to(tl.int64)
        p_value = p_pool + b_slot[:, None] * ALIGN * stride_slot + o_d[None, :]
        b_value = decode(
            tl.load(p_value, mask=m_n[:, None] & m_d[None, :], other=0), shift, limit, factor, beyond, KIND
        )
        b_value -= b_center[None, :]
        b_size = tl.sum(b_value * b_value, axis=1)
        if FT:
            p_key = p_keys + b_slot[:, None] * KEY_ALIGN * key_slot  # pyright: ignore[reportPossiblyUnboundVariable]
            b_size = tl.log(tl.maximum(b_size, LEAST, propagate_nan=tl.PropagateNan.ALL))
            b_size += tl.sum(b_value * b_value_weight[None, :], axis=1)  # pyright: ignore[reportPossiblyUnboundVariable]
            for tile in range(tl.cdiv(F, FT)):  # pyright: ignore[reportPossiblyUnboundVariable]
                o_f = tile * FT + tl.arange(0, FT)
                m_f = o_f < F  # pyright: ignore[reportPossiblyUnboundVariable]
                b_kre, b_kim = load_keys(
                    p_key, m_n, o_f, m_f, tile, F, shift, limit, factor, beyond, FT, KIND, INTERLEAVED  # pyright: ignore[reportPossiblyUnboundVariable]
                )  # fmt: skip
                b_weight = 2 * tl.load(p_weight + o_f, mask=m_f, other=0.0)  # pyright: ignore[reportPossiblyUnboundVariable]
                b_size += tl.sum(tl.sqrt(b_kre * b_kre + b_kim * b_kim) * b_weight[None, :], axis=1)
        b_fall = power * tl.log(tl.maximum(candidates + recent - o_n, 1).to(tl.float32))
        b_size = b_size + b_fall if FT else b_size * tl.exp(b_fall)
        tl.store(p_size + o_n, b_size, mask=m_n)
