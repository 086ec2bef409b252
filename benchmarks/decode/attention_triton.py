"""Triton decode attention over a paged KV pool, where FlashInfer is absent.

A request's KV is cut into parts so that a few long requests also fill the GPU; each program reads one KV head's part
once, for all query heads of its group, and a second kernel merges the parts. Lengths are read on the device, so a
captured graph serves requests of any length.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 64
LEAST_GROUP = 16
"""Fewest rows of a matrix product on tensor cores; rows beyond the group's queries are zeros."""

MAX_PARTS = 64


def parts_for(requests: int, kv_heads: int, processors: int) -> int:
    """Parts per request, a power of two: about four programs per multiprocessor for every batch size."""
    wanted = triton.cdiv(4 * processors, requests * kv_heads)
    return min(triton.next_power_of_2(wanted), MAX_PARTS)


class SplitAttention:
    """Working memory for one batch size.

    Args:
        requests, q_heads, kv_heads, head_dim: B, H_q, H_kv, D; D a power of two of at least 16.
        parts: parts per request, a power of two.
    """

    def __init__(self, requests: int, q_heads: int, kv_heads: int, head_dim: int, parts: int, device) -> None:
        self.q_heads, self.kv_heads, self.head_dim, self.parts = q_heads, kv_heads, head_dim, parts
        self._partial = torch.empty(requests, q_heads, parts, head_dim, dtype=torch.float32, device=device)
        self._sizes = torch.empty(requests, q_heads, parts, dtype=torch.float32, device=device)

    def __call__(self, queries, k_pool, v_pool, rows, lengths) -> torch.Tensor:
        """Attention of each request's query over the first lengths[r] slots of its row: [B, H_q, D] like `queries`.

        Args:
            queries: [B, H_q, D]. k_pool, v_pool: [num_slots, H_kv, D], equal strides. rows: [B, width] int32.
            lengths: [B] int32, at least 1.
        """
        answers = torch.empty_like(queries)
        group = self.q_heads // self.kv_heads
        attend_kernel[(self.kv_heads, self.parts, len(queries))](
            queries, k_pool, v_pool, rows, lengths, self._partial, self._sizes,
            rows.stride(0), k_pool.stride(0), k_pool.stride(1), 1.4426950408889634 * self.head_dim**-0.5,
            GROUP=group, PADDED=max(LEAST_GROUP, triton.next_power_of_2(group)), DIM=self.head_dim,
            HEADS=self.kv_heads, PARTS=self.parts, BLOCK=BLOCK, num_warps=4, num_stages=3,
        )  # fmt: skip
        merge_kernel[(len(queries) * self.q_heads,)](
            self._partial, self._sizes, answers, PARTS=self.parts, DIM=self.head_dim, num_warps=4
        )
        return answers


@triton.jit
def attend_kernel(
    queries,  # [B, H_q, D]
    k_pool,
    v_pool,
    rows,  # [B, width]
    lengths,  # [B]
    partial,  # [B, H_q, PARTS, D]: softmax-weighted values of a part
    sizes,  # [B, H_q, PARTS]: log2 of its weights' sum
    stride_row,
    stride_slot,
    stride_head,
    scale,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    DIM: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Grid (H_kv, PARTS, B): programs that run together read neighbouring heads of the same tokens."""
    i_h, i_p, i_b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(lengths + i_b)
    share = tl.cdiv(tl.cdiv(length, PARTS), BLOCK) * BLOCK
    first = i_p * share
    last = tl.minimum(first + share, length)
    o_g, o_d = tl.arange(0, PADDED), tl.arange(0, DIM)
    m_g = o_g < GROUP
    head = i_b * HEADS * GROUP + i_h * GROUP + o_g
    b_q = tl.load(queries + head[:, None] * DIM + o_d[None, :], mask=m_g[:, None], other=0.0)
    b_max = tl.full([PADDED], float("-inf"), tl.float32)
    b_sum = tl.zeros([PADDED], tl.float32)
    b_acc = tl.zeros([PADDED, DIM], tl.float32)
    for start in range(first, last, BLOCK):
        o_n = start + tl.arange(0, BLOCK)
        m_n = o_n < last
        b_slot = tl.load(rows + i_b * stride_row + o_n, mask=m_n, other=0).to(tl.int64)
        b_at = b_slot * stride_slot + i_h * stride_head
        b_k = tl.load(k_pool + b_at[None, :] + o_d[:, None], mask=m_n[None, :], other=0.0)
        b_s = tl.where(m_n[None, :], tl.dot(b_q, b_k) * scale, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_s, 1))
        b_p = tl.exp2(b_s - b_new[:, None])
        b_keep = tl.exp2(b_max - b_new)
        b_v = tl.load(v_pool + b_at[:, None] + o_d[None, :], mask=m_n[:, None], other=0.0)
        b_acc = b_acc * b_keep[:, None] + tl.dot(b_p.to(b_v.dtype), b_v)
        b_sum = b_sum * b_keep + tl.sum(b_p, 1)
        b_max = b_new
    # An empty part counts for nothing: its size is minus infinity, and its values are zeros.
    some = last > first
    b_sum = tl.where(some, b_sum, 1.0)
    b_acc = b_acc / b_sum[:, None]
    b_size = b_max + tl.log2(b_sum)
    place = head * PARTS + i_p
    tl.store(partial + place[:, None] * DIM + o_d[None, :], b_acc, mask=m_g[:, None])
    tl.store(sizes + place, b_size, mask=m_g)


@triton.jit
def merge_kernel(partial, sizes, answers, PARTS: tl.constexpr, DIM: tl.constexpr):
    """Grid (B * H_q,)."""
    i = tl.program_id(0).to(tl.int64)
    o_p, o_d = tl.arange(0, PARTS), tl.arange(0, DIM)
    b_size = tl.load(sizes + i * PARTS + o_p)
    b_weight = tl.exp2(b_size - tl.max(b_size, 0))
    b_part = tl.load(partial + (i * PARTS + o_p)[:, None] * DIM + o_d[None, :])
    b_out = tl.sum(b_part * b_weight[:, None], 0) / tl.sum(b_weight, 0)
    tl.store(answers + i * DIM + o_d, b_out.to(answers.dtype.element_ty))
