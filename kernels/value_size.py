"""Sizes of cached values: a second criterion beside the score, for each layer and KV head by itself.

A token's value enters the output as (attention weight) x v. Where two tokens get about the same attention, the one with
the larger value changes the output more; a value of almost no length is lost without a trace. The size is squared,

    size = sum_d v_d^2,

because only the order counts and the root of a sum keeps it. For the same reason a pool that was divided by a v_scale
(float8) needs no correction: one factor for all values of a layer changes no order.

Symbols of shapes: R requests, L layers, H_kv KV heads, N tokens.
"""

from collections.abc import Sequence

import torch

from sglang_triattn.kernels.score import gather_slots, scratch_bytes


def check_values(
    k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor] | None, selection: str, value_share: float
) -> None:
    """Whether values can decide about a share of what a `Scorer` keeps.

    Args:
        k_buffers, v_buffers: per layer [num_slots, H_kv, head_dim]; the head dims may differ.

    Raises ValueError unless 0 <= `value_share` <= 1, and where it is not 0, unless the selection is "per-layer-head"
    and the value pools are of as many layers and heads as the key pools.
    """
    if not 0 <= value_share <= 1:
        raise ValueError(f"value_share must lie between 0 and 1, got {value_share}")
    if not value_share:
        return
    if selection != "per-layer-head":
        raise ValueError(f"value_share needs the selection per-layer-head, got {selection!r}")
    if v_buffers is None:
        raise ValueError("value_share needs the value pool")
    shapes = [(len(buffers), *buffers[0].shape[:2]) for buffers in (k_buffers, v_buffers)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"keys and values must have one number of layers, slots and KV heads, got {shapes}")


def value_count(keep: int, recent: int, value_share: float) -> int:
    """How many of the kept tokens the sizes decide about: a share of all but the newest, halves to the even number."""
    return round(value_share * (keep - recent))


def value_size_naive(v_buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
    """Squared sizes of the values of R requests in all layers and KV heads.

    Args:
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values in bf16, fp16, fp32 or float8.
        slots: [R, N] int32 or int64, private slots of each request, right-padded with any valid slot. Sizes of padded
            columns are meaningless.

    Returns:
        [R, L, H_kv, N] float32.
    """
    requests, columns = slots.shape
    first = v_buffers[0]
    heads, width = first.shape[1:]
    sizes = slots.new_empty((requests, len(v_buffers), heads, columns), dtype=torch.float32)
    # Gathered as stored, as float32, and squared.
    step = max(1, scratch_bytes(first) // (max(requests, 1) * heads * width * (8 + first.element_size())))
    for start in range(0, columns, step):
        part = slots[:, start : start + step]
        for layer, pool in enumerate(v_buffers):
            values = gather_slots(pool, part.reshape(-1)).float()
            size = values.square().sum(-1).unflatten(0, part.shape)  # [R, n, H_kv]
            sizes[:, layer, :, start : start + step] = size.transpose(1, 2)
    return sizes
