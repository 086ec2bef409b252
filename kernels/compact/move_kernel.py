"""Triton `move`: all K/V copies of a round, every layer, head and request in one launch; see `reference.move_torch`.

Bytes are copied as 32-bit words for every dtype of the pool. One program handles one KV head of one layer's K or V for
one request, or some of its moves; no other program touches those bytes.

Why nothing is overwritten before it is read, although the copies are in place:

- fill: sources lie in the columns that are emptied and targets outside them. They never meet, so the order of the
  copies does not matter and they are spread over programs.
- slide: token m moves from kept[m] to m, and kept[m] >= m grows with m. A target can only be the source of the same or
  an earlier move. One program makes all moves of its head, block by block in ascending order; within a block all rows
  are loaded into registers, and a barrier is passed, before the first one is written.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang_triattn.kernels.launcher import Launcher
from sglang_triattn.kernels.pools import KeyPools

WORD = 4
"""Bytes per word."""

ALIGNMENT = 16
"""A head's K or V must be a multiple of this many bytes, so that copies are wide."""

MAX_WORDS = 1024
"""Most words per head: 1,024 dims in float32."""

WORDS_IN_FLIGHT = 4096


class MoveKernel:
    """`move_kernel` for the pools of one model, with all arguments that no round changes.

    Args:
        pools: K of all layers, V of all layers, or one after the other.
        layers: L.

    Does not check the pools: those that `check_movable` refuses are moved incorrectly.
    """

    def __init__(self, pools: KeyPools, layers: int) -> None:
        first = pools.buffers[0]
        width = first.element_size()
        self._pools, self._layers, self._heads = pools, layers, first.shape[1]
        self._settings = {ordered: move_settings(first.shape[2] * width // WORD, ordered) for ordered in (False, True)}
        self._launchers = {ordered: Launcher(move_kernel, each) for ordered, each in self._settings.items()}
        self._widths = tuple(each * width // ALIGNMENT for each in (*first.stride()[:2], first.shape[2]))

    def move(self, sources: torch.Tensor, targets: torch.Tensor, *, ordered: bool) -> None:
        """Copies K/V rows in place; arguments as for `move_triton`."""
        requests, moves = sources.shape[0], sources.shape[-1]
        if not moves:
            return
        parts = 1 if ordered else -(-moves // self._settings[ordered]["BLOCK"])
        self._launchers[ordered](
            (len(self._pools.buffers) * self._heads, parts, requests),
            self._pools.addresses,
            sources,
            targets,
            self._layers,
            self._heads,
            moves,
            sources.shape[1] if sources.ndim == 4 else 1,
            sources.shape[-2] if sources.ndim > 2 else 1,
            *self._widths,
        )


def move_triton(pools: KeyPools, sources: torch.Tensor, targets: torch.Tensor, *, layers: int, ordered: bool) -> None:
    """Copies K/V rows in place.

    Args:
        pools, layers: as for `MoveKernel`.
        sources, targets: from `list_moves_triton`.
        ordered: True for "slide".
    """
    MoveKernel(pools, layers).move(sources, targets, ordered=ordered)


def check_movable(pools: KeyPools) -> None:
    """Raises ValueError unless heads start and end at multiples of ALIGNMENT and have at most MAX_WORDS words."""
    first = pools.buffers[0]
    head_dim, width = first.shape[2], first.element_size()
    if any(count * width % ALIGNMENT for count in (head_dim, *first.stride()[:2])):
        raise ValueError(
            f"a head of {head_dim} {first.dtype} cannot be moved: its bytes, and those from one head to the next, must "
            f"be a multiple of {ALIGNMENT}"
        )
    if head_dim * width > MAX_WORDS * WORD:
        raise ValueError(f"a head of {head_dim} {first.dtype} cannot be moved: it exceeds {MAX_WORDS * WORD} bytes")


def move_settings(words: int, ordered: bool) -> dict:
    """Compile-time arguments of `move_kernel` for heads of `words` words."""
    padded = triton.next_power_of_2(words)
    return {"WORDS": padded, "BLOCK": max(1, WORDS_IN_FLIGHT // padded), "ORDERED": ordered, "num_warps": 4}


@triton.jit(do_not_specialize=list(range(11)))
def move_kernel(
    addresses,  # [P], a multiple of L
    sources,  # [R, set_layers, set_heads, M]
    targets,  # [R, set_layers, set_heads, M]
    layers,
    heads,
    moves,
    set_layers,
    set_heads,
    stride_slot,
    stride_head,
    width,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ORDERED: tl.constexpr,
):
    """Grid (P * H_kv, parts, R); strides and width of a head in units of 16 bytes."""
    i_b, i_p, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_pool, i_h = i_b // heads, i_b % heads
    # One set may serve all layers, or all heads.
    i_set = (i_r * set_layers + (i_pool % layers) % set_layers) * set_heads + i_h % set_heads
    # Multiples of 4 words that the compiler can see, for copies of 16 bytes.
    p_pool = tl.multiple_of(tl.load(addresses + i_pool).to(tl.pointer_type(tl.int32)), 16)
    p_pool += i_h.to(tl.int64) * stride_head * 4
    o_w = tl.arange(0, WORDS)
    for start in range(i_p * BLOCK, moves, BLOCK * tl.num_programs(1)):
        o_m = start + tl.arange(0, BLOCK)
        b_source = tl.load(sources + i_set * moves + o_m, mask=o_m < moves, other=0).to(tl.int64)
        b_target = tl.load(targets + i_set * moves + o_m, mask=o_m < moves, other=0).to(tl.int64)
        m_row = (b_source != b_target)[:, None] & (o_w < width * 4)[None, :]
        b_row = tl.load(p_pool + b_source[:, None] * stride_slot * 4 + o_w[None, :], mask=m_row)
        if ORDERED:
            tl.debug_barrier()
        tl.store(p_pool + b_target[:, None] * stride_slot * 4 + o_w[None, :], b_row, mask=m_row)
