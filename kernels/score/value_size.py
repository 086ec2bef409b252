"""Sizes of cached values: a second criterion next to the score, separate for each layer and KV head.

An attention head's output is the attention-weighted mean of the values, o = sum_i a_i v_i. Without token i it becomes
o - a_i / (1 - a_i) (v_i - o) (CAOTE, arXiv 2504.14051): the loss is proportional to the distance of v_i from the
output, not to its length. In many heads the values share a large common part, which says nothing about a token. So
values are measured from a center that stands for the output, the plain mean of the newest tokens' values:

    size = sum_d (v_d - c_d)^2,    c = mean of v over the newest min(recent, NEWEST) tokens, 0 where recent is 0

The newest tokens stay anyway, and their places are known in whichever order rounds left the others. The size is
squared because only the order counts, which a square root would not change. For the same reason a pool that was
divided by a v_scale (float8) needs no correction: one factor for all values of a layer changes no order.

Shape symbols: R requests, L layers, H_kv KV heads, N tokens.
"""

from collections.abc import Sequence

import torch

from sglang_triattn.kernels.score.reference import gather_slots, workspace_bytes
from sglang_triattn.kernels.select import selection_named

NEWEST = 64
"""Most tokens whose values are averaged into the center."""


def check_values(
    k_buffers: Sequence[torch.Tensor], v_buffers: Sequence[torch.Tensor] | None, selection: str, value_share: float
) -> None:
    """Checks that values can decide a share of what a `Scorer` keeps.

    Args:
        k_buffers, v_buffers: per layer [num_slots, H_kv, head_dim]; the head dims may differ.

    Raises:
        ValueError: `value_share` is outside [0, 1]; or it is not 0 and the selection is not "per-layer-head", or the
            value pools do not have as many layers and heads as the key pools.
    """
    if not 0 <= value_share <= 1:
        raise ValueError(f"value_share must lie between 0 and 1, got {value_share}")
    if not value_share:
        return
    if not selection_named(selection).per_layer:
        raise ValueError(f"value_share needs the selection per-layer-head, got {selection!r}")
    if v_buffers is None:
        raise ValueError("value_share needs the value pool")
    shapes = [(len(buffers), *buffers[0].shape[:2]) for buffers in (k_buffers, v_buffers)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"keys and values must have one number of layers, slots and KV heads, got {shapes}")


def value_count(num_kept: int, recent: int, value_share: float) -> int:
    """How many of the kept tokens the sizes decide: a share of all but the newest, halves rounded to even."""
    return round(value_share * (num_kept - recent))


def value_size_torch(
    v_buffers: Sequence[torch.Tensor], slots: torch.Tensor, lengths: torch.Tensor, recent: int
) -> torch.Tensor:
    """Squared sizes of the values of R requests in all layers and KV heads.

    Args:
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values in bf16, fp16, fp32 or float8.
        slots: [R, N] int32 or int64, private slots of each request, right-padded with any valid slot. Sizes of padded
            columns are meaningless.
        lengths: [R] int64, private tokens of each request, at least `recent`.
        recent: newest tokens of each request, which stay.

    Returns:
        [R, L, H_kv, N] float32.
    """
    requests, num_tokens = slots.shape
    first = v_buffers[0]
    heads, width = first.shape[1:]
    sizes = slots.new_empty((requests, len(v_buffers), heads, num_tokens), dtype=torch.float32)
    sample = min(recent, NEWEST)
    newest = slots.gather(1, lengths[:, None] - sample + torch.arange(sample, device=slots.device))  # [R, sample]
    # Four copies: as stored, as float32, centered, and squared.
    step = max(1, workspace_bytes(first) // (max(requests, 1) * heads * width * (12 + first.element_size())))
    centers = [
        gather_slots(pool, newest.reshape(-1)).float().unflatten(0, newest.shape).mean(1, keepdim=True)
        for pool in (v_buffers if sample else ())
    ]  # each [R, 1, H_kv, head_dim]
    for start in range(0, num_tokens, step):
        part = slots[:, start : start + step]
        for layer, pool in enumerate(v_buffers):
            values = gather_slots(pool, part.reshape(-1)).float().unflatten(0, part.shape)  # [R, n, H_kv, head_dim]
            if sample:
                values -= centers[layer]
            sizes[:, layer, :, start : start + step] = values.square_().sum(-1).transpose(1, 2)
    return sizes
