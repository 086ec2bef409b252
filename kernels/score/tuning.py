"""How `score_kernel` is compiled and launched, by model, key dtype and GPU: tile sizes, warps and registers."""

from __future__ import annotations

import torch
import triton
import triton.knobs

from sglang_triattn.kernels.pools import KINDS
from sglang_triattn.kernels.score.reference import CHUNK

BLOCK = 64
"""Tokens in flight at once: the rows of one Hopper tensor-core instruction."""

HEADS = 16
"""Most query heads per program; a larger group is spread over several."""

WARPGROUPS = 9
"""First compute capability whose tensor cores read an operand from shared memory."""

MAX_TILE = 64
"""Most frequencies held in registers at once; larger heads are read in tiles."""

ALIGN = 8
"""Loads are wide only if the halves of a head and the pool's strides are multiples of this many elements."""


def has_warpgroups(pool: torch.Tensor) -> bool:
    """Whether the GPU of `pool` multiplies by four warps together; assumed of a pool that is on none."""
    return not pool.is_cuda or torch.cuda.get_device_capability(pool.device)[0] >= WARPGROUPS


def launch_settings(
    dtype: torch.dtype,
    frequencies: int,
    group: int,
    style: str,
    aggregation: str,
    aligned: bool,
    warpgroups: bool,
    others: int = 0,
) -> dict:
    """Compile-time arguments and launch settings of `score_kernel` for one model and key dtype.

    Args:
        aligned: whether the frequencies, `others` and the pool's strides are multiples of ALIGN.
        warpgroups: whether four warps multiply together on the GPU: from compute capability WARPGROUPS on.
        others: dims of a head that RoPE does not turn and that are scored.
    """
    offsets = aggregation == "max"
    # Odd shapes are served by the general kernel: tiles, sixteen columns, narrow loads. So are those in which unrotated
    # dims join a wide rotated part.
    tiled = frequencies > (MAX_TILE // 2 if others else MAX_TILE) or not aligned
    heads = 4 if offsets else (HEADS if not aligned else min(HEADS, max(4, triton.next_power_of_2(group))))
    tile = 32 if frequencies <= 32 else MAX_TILE
    # With 64 rows these would spill registers. Fewer rows also keep Triton 3.8 off Blackwell's tensor memory, where it
    # cannot compile the loop over offsets.
    rows = 32 if offsets or dtype.itemsize == 1 else BLOCK
    # Without warpgroup products, each warp has its own copy of the columns in registers.
    copies = heads == HEADS and tile == MAX_TILE and dtype == torch.bfloat16 and not warpgroups
    if copies:
        rows = 32
    elif heads == HEADS and (dtype.itemsize != 2 or (tile == MAX_TILE and dtype == torch.float16)):
        rows = 16
    if tiled:
        narrow = dtype.itemsize > 1 if offsets else (dtype != torch.bfloat16 and heads == HEADS)
        # With the loop over unrotated dims, larger tiles would spill registers here.
        rows, tile = 16, 16 if narrow or others else 32
    # With unrotated dims, a head's rotated part is a single tile of 32 frequencies or comes in tiles.
    held = 0 < others <= MAX_TILE and not tiled and not offsets
    width = (32 if others <= 32 else MAX_TILE) if held else min(tile, 32)
    # More warps where so many columns or offsets would fill the registers of four.
    crowded = heads == HEADS and (tiled or dtype.itemsize == 4 or dtype == torch.float16 or copies)
    return {
        "KIND": KINDS[dtype],
        "FT": tile,
        "TILED": tiled,
        "UT": width if others else 0,
        "HELD": held,
        "GP": heads,
        "MAX": offsets,
        "INTERLEAVED": style == "interleaved",
        "ALIGN": ALIGN if aligned else 1,
        "BLOCK": rows,
        "CHUNK": CHUNK,
        "WIDEN": triton.knobs.runtime.interpret,
        "num_warps": 8 if crowded or (offsets and not tiled) else 4,
        "num_stages": 2 if (tiled and dtype.itemsize > 1) or tile * dtype.itemsize > 128 else 3,
        # Left alone, ptxas trades a few spills for more resident programs here.
        "maxnreg": 255 if tiled or offsets or dtype.itemsize == 1 else None,
    }
