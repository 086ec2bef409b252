"""Triton `value_size`: the sizes of all values of a round in one launch; reference: `value_size.value_size_torch`.

One program handles TOKENS of a request's private tokens in one KV head of one layer. It reads each value once, straight
from the paged pool, and writes one number for it. Of the newest tokens, which stay at any size, it reads only
the NEWEST that make up the center; other programs of the row read the same ones from the cache. Sums run over the
row's own values alone, in an order that depends only on their number and dtype, so the batch around a request cannot
change a bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.pools import FLOAT8, KINDS, KeyPools
from sglang_triattn.kernels.score.parts import decode, pool_pointer
from sglang_triattn.kernels.score.value_size import NEWEST

ALIGNMENT = 16
"""A head's values must be a multiple of this many bytes, as `move_kernel.check_movable` requires."""

TOKENS = 256
"""Tokens per program."""

NUMBERS_IN_FLIGHT = 4096
"""Numbers of one or two bytes in flight at once; half as many of four bytes."""


class ValueSizeKernel:
    """`value_size_kernel` for some layers of one model, with all arguments that no round changes.

    Args:
        pools: of values, from `key_pools`; `check_movable` must accept them.
    """

    def __init__(self, pools: KeyPools) -> None:
        pool = pools.buffers[0]
        heads, width = pool.shape[1:]
        settings = value_settings(pool.dtype, width)
        self._launch = Launcher(value_size_kernel, settings)
        self._pools, self._heads = pools, heads
        self._programs = len(pools.buffers) * heads
        self._widths = tuple(each // settings["ALIGN"] for each in (width, pool.stride(0), pool.stride(1)))
        self._float8 = FLOAT8.get(pool.dtype, (0, 0, 0.0, 0.0))

    def measure(self, slots: torch.Tensor, lengths: torch.Tensor, recent: int, sizes: torch.Tensor) -> None:
        """Fills `sizes`, which are as `value_size_triton` returns them.

        Args:
            slots: [R, N] int32, rows of adjacent elements; lengths: [R] int64; recent: as for `value_size_triton`.
        """
        requests, num_tokens = slots.shape
        self._launch(
            (self._programs, -(-num_tokens // TOKENS), requests),
            self._pools.addresses,
            slots,
            lengths,
            sizes,
            self._heads,
            num_tokens,
            recent,
            min(recent, NEWEST),
            *self._widths,
            slots.stride(0),
            *self._float8,
        )


def value_size_triton(
    pools: KeyPools, slots: torch.Tensor, lengths: torch.Tensor, recent: int, *, sizes: torch.Tensor | None = None
) -> torch.Tensor:
    """Squared sizes of the values of R requests in all layers and KV heads.

    Args:
        pools: as for `ValueSizeKernel`.
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
    ValueSizeKernel(pools).measure(slots.to(torch.int32), lengths, recent, sizes)
    return sizes


def value_settings(dtype: torch.dtype, width: int) -> dict:
    """Compile-time arguments of `value_size_kernel` for heads of `width` dims."""
    padded = triton.next_power_of_2(width)
    return {
        "KIND": KINDS[dtype],
        "ALIGN": ALIGNMENT // dtype.itemsize,
        "WIDTH": padded,
        "BLOCK": min(TOKENS, max(1, NUMBERS_IN_FLIGHT * 2 // max(dtype.itemsize, 2) // padded)),
        "TOKENS": TOKENS,
        "num_warps": 4,
    }


# As in `score_triton`, nothing is specialised on a run-time value.
@triton.jit(do_not_specialize=list(range(16)))
def value_size_kernel(
    addresses,  # [L] int64
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
    stride_row,
    shift,
    limit,
    factor,
    beyond,
    KIND: tl.constexpr,
    ALIGN: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Grid (L * H_kv, ceil(N / TOKENS), R).

    `sample` newest tokens make the center. `width`, `stride_slot` and `stride_head` count ALIGN elements. `shift` to
    `beyond` decode float8.
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
        tl.store(p_size + o_n, tl.sum(b_value * b_value, axis=1), mask=m_n)
