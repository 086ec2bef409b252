"""Triton kernels of a decode step between its matrix products, one launch each; references: `model.TorchOps`.

A server fuses these too. In plain torch they are some forty launches per layer, which would hide the cost of attention.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def add_norm(x, residual, weight, epsilon: float):
    """(RMSNorm of x + residual, that sum), [B, hidden]; overwrites `residual`. Without a residual, of x alone."""
    out = torch.empty_like(x)
    total = x if residual is None else residual
    size = x.shape[1]
    add_norm_kernel[(len(x),)](
        x, total, weight, out, size, epsilon,
        ADD=residual is not None, BLOCK=triton.next_power_of_2(size), num_warps=8,
    )  # fmt: skip
    return out, total


def rotate_and_store(qkv, shape, layer, positions, cos_sin, slots, k_pool, v_pool) -> torch.Tensor:
    """Queries [B, H_q, D], normalised and rotated; K and V go to the pools."""
    queries = torch.empty(len(qkv), shape.q_heads, shape.head_dim, dtype=qkv.dtype, device=qkv.device)
    # If heads are not normalised, any weights will do: the kernel does not read them.
    weights = (layer.q_norm, layer.k_norm) if shape.norm_heads else (layer.norm, layer.norm)
    rotate_kernel[(shape.q_heads + 2 * shape.kv_heads, len(qkv))](
        qkv, queries, *weights, positions, cos_sin, slots, k_pool, v_pool,
        shape.q_heads, shape.kv_heads, k_pool.stride(0), k_pool.stride(1), shape.epsilon,
        NORM=shape.norm_heads, HALF=shape.head_dim // 2, num_warps=1,
    )  # fmt: skip
    return queries


def gate(gate_up) -> torch.Tensor:
    """[B, inner] from [B, 2 inner]: SiLU of the first half times the second."""
    size = gate_up.shape[1] // 2
    out = torch.empty(len(gate_up), size, dtype=gate_up.dtype, device=gate_up.device)
    gate_kernel[(triton.cdiv(size, 1024), len(gate_up))](gate_up, out, size, BLOCK=1024, num_warps=4)
    return out


def flatten_rows(rows, lengths, indptr, indices, longest: int) -> None:
    """Concatenates the first lengths[r] slots of every row.

    Args:
        rows: [B, width] int32. lengths: [B] int32. indptr: [B + 1] int32, where each row starts in `indices`.
        indices: int32, written. longest: an upper bound on the lengths.
    """
    grid = (triton.cdiv(longest, 1024), len(rows))
    flatten_kernel[grid](rows, lengths, indptr, indices, rows.stride(0), BLOCK=1024, num_warps=4)


@triton.jit
def add_norm_kernel(x, total, weight, out, size, epsilon, ADD: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (B,)."""
    at = tl.program_id(0) * size
    o = tl.arange(0, BLOCK)
    m = o < size
    b_x = tl.load(x + at + o, mask=m, other=0.0)
    if ADD:
        b_sum = b_x.to(tl.float32) + tl.load(total + at + o, mask=m, other=0.0).to(tl.float32)
        b_x = b_sum.to(x.dtype.element_ty)
        tl.store(total + at + o, b_x, mask=m)
    b_wide = b_x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(b_wide * b_wide, 0) / size + epsilon)
    b_weight = tl.load(weight + o, mask=m, other=0.0).to(tl.float32)
    tl.store(out + at + o, (b_wide * scale * b_weight).to(out.dtype.element_ty), mask=m)


@triton.jit
def rotate_kernel(
    qkv,  # [B, H_q + 2 H_kv, D]
    queries,  # [B, H_q, D]
    q_weight,
    k_weight,
    positions,  # [B]
    cos_sin,  # [P, D], cos before sin
    slots,  # [B]
    k_pool,
    v_pool,
    q_heads,
    kv_heads,
    stride_slot,
    stride_head,
    epsilon,
    NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    """Grid (H_q + 2 H_kv, B); a program has one head of one request."""
    i_h, i_b = tl.program_id(0), tl.program_id(1)
    o = tl.arange(0, HALF)
    p_head = qkv + (i_b * (q_heads + 2 * kv_heads) + i_h) * (2 * HALF)
    b_first, b_second = tl.load(p_head + o).to(tl.float32), tl.load(p_head + HALF + o).to(tl.float32)
    slot = tl.load(slots + i_b).to(tl.int64)
    dtype = qkv.dtype.element_ty
    if i_h >= q_heads + kv_heads:
        p_value = v_pool + slot * stride_slot + (i_h - q_heads - kv_heads) * stride_head
        tl.store(p_value + o, b_first.to(dtype))
        tl.store(p_value + HALF + o, b_second.to(dtype))
    else:
        if NORM:
            square = tl.sum(b_first * b_first, 0) + tl.sum(b_second * b_second, 0)
            scale = 1.0 / tl.sqrt(square / (2 * HALF) + epsilon)
            p_weight = q_weight
            if i_h >= q_heads:
                p_weight = k_weight
            # Rounded as the reference rounds between norm and rotation.
            b_first = (b_first * scale * tl.load(p_weight + o).to(tl.float32)).to(dtype).to(tl.float32)
            b_second = (b_second * scale * tl.load(p_weight + HALF + o).to(tl.float32)).to(dtype).to(tl.float32)
        p_turn = cos_sin + tl.load(positions + i_b) * (2 * HALF)
        b_cos, b_sin = tl.load(p_turn + o), tl.load(p_turn + HALF + o)
        p_out = queries + (i_b * q_heads + i_h) * (2 * HALF)
        if i_h >= q_heads:
            p_out = k_pool + slot * stride_slot + (i_h - q_heads) * stride_head
        tl.store(p_out + o, (b_first * b_cos - b_second * b_sin).to(dtype))
        tl.store(p_out + HALF + o, (b_second * b_cos + b_first * b_sin).to(dtype))


@triton.jit
def gate_kernel(gate_up, out, size, BLOCK: tl.constexpr):
    """Grid (blocks of `size`, B)."""
    i_b = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < size
    b_gate = tl.load(gate_up + i_b * 2 * size + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(gate_up + i_b * 2 * size + size + o, mask=m, other=0.0).to(tl.float32)
    b_out = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    tl.store(out + i_b * size + o, b_out.to(out.dtype.element_ty), mask=m)


@triton.jit
def flatten_kernel(rows, lengths, indptr, indices, stride_row, BLOCK: tl.constexpr):
    """Grid (blocks of the longest row, B)."""
    i_b = tl.program_id(1)
    o = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    m = o < tl.load(lengths + i_b)
    b_slot = tl.load(rows + i_b.to(tl.int64) * stride_row + o, mask=m)
    tl.store(indices + tl.load(indptr + i_b) + o, b_slot, mask=m)
