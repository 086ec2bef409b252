"""Sizes of cached values: a second criterion next to the score, separate for each layer and KV head.

An attention head's output is the attention-weighted mean of the values, o = sum_i a_i v_i. Without token i it becomes
o - a_i / (1 - a_i) (v_i - o) (CAOTE, arXiv 2504.14051): the loss is proportional to the distance of v_i from the
output, not to its length. In many heads the values share a large common part, which says nothing about a token. So
values are measured from a center that stands for the output, the plain mean of the newest tokens' values:

    size = sum_d (v_d - c_d)^2,    c = mean of v over the newest min(recent, NEWEST) tokens, 0 where recent is 0

The newest tokens stay anyway, and their places are known in whichever order rounds left the others. The size is
squared because only the order counts, which a square root would not change. For the same reason a pool that was
divided by a v_scale (float8) needs no correction: one factor for all values of a layer changes no order.

The loss is also proportional to a_i. How much attention a token may get at most, when a later one looks it up, is
predicted from its cached key and value by weights w and u that were fitted to the model (`LookUps`): RoPE turns a key's
complex components K_f, but does not change their sizes. With weights,

    size = log(sum_d (v_d - c_d)^2) + 2 (sum_f w_f |K_f| + sum_d u_d (v_d - c_d))

which is, up to a constant of the row, the logarithm of a squared product.

Attention also falls off with distance. Where rounds keep a row in order, a token's rank, one more than the number of
newer tokens in the row, says how old it is: the age in a short row, and less in a long one, whose older tokens are
mostly evicted. With a recency p, sizes are those of values that are divided by the p-th power of their rank.

Shape symbols: R requests, L layers, H_kv KV heads, F frequencies (half the rotated dims), N tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_triattn.kernels.score.reference import gather_slots, workspace_bytes
from sglang_triattn.kernels.select import selection_named

NEWEST = 64
"""Most tokens whose values are averaged into the center."""

LEAST_DIMS, MOST_DIMS = 32, 256
"""Smallest and largest values that kernels weigh."""

LEAST = 1e-30
"""Smallest squared distance whose logarithm is taken: equal values stay comparable."""


@dataclass(frozen=True, eq=False)
class LookUps:
    """Weights that predict from a cached key and value how strongly later tokens may look them up.

    Attributes:
        weights: [L, H_kv, F + v_head_dim] float32, on the pools' device, w and u, of keys and values as the pools hold
            them.
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of keys, whose first 2F dims RoPE turns.
        style: how these pair up, see `ScoreTables`.
    """

    weights: torch.Tensor
    k_buffers: Sequence[torch.Tensor]
    style: str

    def frequencies(self, value_dim: int) -> int:
        """F, where values have `value_dim` dims."""
        return self.weights.shape[-1] - value_dim

    def __getitem__(self, layers: slice) -> "LookUps":
        """The weights of some layers."""
        return LookUps(self.weights[layers], self.k_buffers[layers], self.style)


def check_values(
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor] | None,
    selection: str,
    value_share: float,
    lookups: LookUps | None = None,
) -> None:
    """Checks that values can decide a share of what a `Scorer` keeps.

    Args:
        k_buffers, v_buffers: per layer [num_slots, H_kv, head_dim]; the head dims may differ.

    Raises:
        ValueError: `value_share` is outside [0, 1]; or it is not 0 and the selection is not "per-layer-head", or the
            value pools do not have as many layers and heads as the key pools, or `lookups` do not fit these.
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
    if lookups is not None:
        frequencies, (heads, dims) = lookups.frequencies(v_buffers[0].shape[2]), k_buffers[0].shape[1:]
        if lookups.weights.shape[:2] != (len(k_buffers), heads) or not 0 < 2 * frequencies <= dims:
            raise ValueError(
                f"look-up weights {list(lookups.weights.shape)} do not fit {len(k_buffers)} layers of "
                f"{list(k_buffers[0].shape[1:])} keys and {list(v_buffers[0].shape[1:])} values"
            )
        if k_buffers[0].dtype != v_buffers[0].dtype:
            raise ValueError(f"look-ups need one dtype, got {k_buffers[0].dtype} keys and {v_buffers[0].dtype} values")


def value_count(num_kept: int, recent: int, value_share: float) -> int:
    """How many of the kept tokens the sizes decide: a share of all but the newest, halves rounded to even."""
    return round(value_share * (num_kept - recent))


def value_size_torch(
    v_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    lengths: torch.Tensor,
    recent: int,
    lookups: LookUps | None = None,
    recency: float = 0.0,
) -> torch.Tensor:
    """Squared sizes of the values of R requests in all layers and KV heads; with `lookups` their logarithms, weighed.

    Args:
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values in bf16, fp16, fp32 or float8.
        slots: [R, N] int32 or int64, private slots of each request, right-padded with any valid slot. Sizes of padded
            columns are meaningless.
        lengths: [R] int64, private tokens of each request, at least `recent`.
        recent: newest tokens of each request, which stay.
        recency: power of a token's rank by which its value is divided; 0 for rows that are not in order.

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
            strength = None if lookups is None else _strengths(lookups, layer, part, values)
            found = sizes[:, layer, :, start : start + step]
            found.copy_(values.square_().sum(-1).transpose(1, 2))
            if strength is not None:
                found.clamp_min_(LEAST).log_().add_(strength, alpha=2)
    if recency:
        ranks = lengths[:, None] - torch.arange(num_tokens, device=slots.device)
        fall = (-2 * recency * ranks.clamp_min(1).float().log())[:, None, None]
        sizes = sizes.mul_(fall.exp()) if lookups is None else sizes.add_(fall)
    return sizes


def _strengths(lookups: LookUps, layer: int, slots: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """What the weights of one layer make of the keys at `slots` [R, n] and of the centered `values`
    [R, n, H_kv, head_dim]: [R, H_kv, n] float32."""
    half = lookups.frequencies(values.shape[-1])
    of_keys, of_values = lookups.weights[layer].split((half, values.shape[-1]), dim=-1)
    keys = gather_slots(lookups.k_buffers[layer], slots.reshape(-1)).float()[..., : 2 * half]
    pairs = keys.unflatten(-1, (2, half)) if lookups.style == "half" else keys.unflatten(-1, (half, 2)).mT
    found = torch.einsum("nhf,hf->nh", pairs.norm(dim=-2), of_keys).unflatten(0, slots.shape)
    return (found + torch.einsum("rnhd,hd->rnh", values, of_values)).transpose(1, 2)
