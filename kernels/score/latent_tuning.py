"""How `latent_kernel` is compiled and launched, by model and dtype; and which pools it can read."""

from __future__ import annotations

import torch
import triton
import triton.knobs

from sglang_triattn.kernels.pools import KINDS
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.score.tables import ScoreTables
from sglang_triattn.kernels.score.tuning import ALIGN

HEADS = 128
"""Most query heads per program: all those of DeepSeek-V3."""

LEAST_HEADS = 16
"""The narrowest product of tensor cores that is worth its while."""


def check_latents(pool: torch.Tensor, tables: ScoreTables) -> None:
    """Raises ValueError unless the kernel can read a pool of latents [num_slots, 1, U + 2F]: in wide pieces, and with
    every layer rotated."""
    sizes = (tables.rotary_start, tables.rotary_dim // 2, pool.stride(0))
    if any(size % ALIGN for size in sizes):
        raise ValueError(f"dims of latents, frequencies and rows must be multiples of {ALIGN}, got {sizes}")
    if not tables.rotary_start or tables.num_kv_heads != 1:
        raise ValueError(f"latents are one KV head that the rotated dims follow, got {tables.num_kv_heads}")


def launch_settings(dtype: torch.dtype, q_heads: int, style: str, aggregation: str, warpgroups: bool) -> dict:
    """Compile-time arguments and launch settings of `latent_kernel` for one model and dtype.

    Args:
        warpgroups: as for `launch_settings` of `score_kernel`.
    """
    offsets = aggregation == "max"
    # Latents of more than one bfloat16 part, and accumulators for offsets, would spill registers with so many heads.
    single = dtype == torch.bfloat16 or dtype.itemsize == 1
    wide = single and (warpgroups or style == "interleaved")
    most = (LEAST_HEADS if offsets else HEADS // 2) * (2 if wide else 1)
    heads = min(most, max(LEAST_HEADS, triton.next_power_of_2(q_heads)))
    return {
        "KIND": KINDS[dtype],
        "FT": 16,
        "UT": 32,
        "GP": heads,
        "MAX": offsets,
        "INTERLEAVED": style == "interleaved",
        "ALIGN": ALIGN,
        "BLOCK": 64 if warpgroups and single and not offsets else 32,
        "CHUNK": CHUNK,
        "WIDEN": triton.knobs.runtime.interpret,
        "num_warps": 8 if heads >= 64 else 4,
        "num_stages": 1,
        # Left alone, ptxas trades a few spills for more resident programs here.
        "maxnreg": 255 if heads < 64 else None,
    }


def latent_columns(tables: ScoreTables, aggregation: str) -> torch.Tensor:
    """The columns that rows of latents are multiplied by, as `latent_kernel` reads them.

    Returns:
        [L, 3, U + 3F, width] bfloat16, contiguous: of every query head the mean query, the spread, and Re and Im of the
        coefficients, each cut into three parts whose sum is exact. `width` is H_q, filled up with zeros to whole
        programs.
    """
    center = tables.mean if aggregation == "max" else tables.center
    rest = torch.cat([tables.unrotated, tables.spread, center.real, center.imag], dim=-1).transpose(1, 2)  # [L, D, H_q]
    rest = torch.nn.functional.pad(rest, (0, -rest.shape[-1] % column_multiple(rest.shape[-1])))
    columns = rest.new_empty((rest.shape[0], 3, *rest.shape[1:]), dtype=torch.bfloat16)
    for part in range(3):
        # Cut off, not rounded, but for the last part, which eight bits are enough for.
        high = (rest.contiguous().view(torch.int32) & -65536).view(torch.float32) if part < 2 else rest
        columns[:, part] = high
        rest = rest - high
    return columns


def column_multiple(q_heads: int) -> int:
    """Heads of one program at most, of which the width of the columns is a multiple."""
    return min(HEADS, max(LEAST_HEADS, triton.next_power_of_2(q_heads)))
