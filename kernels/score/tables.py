"""The constants of one model that scores are computed from; `reference.py` has the formulas and the symbols."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

OFFSETS = tuple(2**i for i in range(17))
"""Distances, in tokens, of the future queries that a score averages over: 1, 2, 4, ..., 65536."""

AGGREGATIONS = ("mean", "max", "norm")
STYLES = ("half", "interleaved")


@dataclass(frozen=True, eq=False)
class ScoreTables:
    """Constants of one model on one device: everything that a score needs except the keys and T."""

    mean: torch.Tensor
    """[L, H_q, F] complex64: s * mu; mu in layers without RoPE."""
    center: torch.Tensor
    """[L, H_q, F] complex64: s * mu * g, the mean over OFFSETS folded in; mu in layers without RoPE."""
    spread: torch.Tensor
    """[L, H_q, F] float32: s * (a - |mu|), never negative; 0 where nothing turns: in layers without RoPE, and at
    frequency 0."""
    unrotated: torch.Tensor
    """[L, H_q, U] float32: mean query in the dims that RoPE never turns; U is 0 if these are not scored."""
    rotates: torch.Tensor
    """[L] float32: 1 where RoPE turns a layer's keys, else 0."""
    inv_freq: torch.Tensor
    """[F] float64: RoPE frequencies in radians per token."""
    offsets: torch.Tensor
    """[17] float64: OFFSETS, on the device so that no round copies them there."""
    style: str
    """half: component f is (x[f], x[f + F]); interleaved: (x[2f], x[2f + 1])."""
    rotary_dim: int
    """2F: the dims of a head that RoPE rotates, in layers that have it."""
    num_kv_heads: int
    rotary_start: int = 0
    """The first of them: 0, or U in a pool of latents, whose rows hold the latent (U dims) and then the rotated key."""

    def __getitem__(self, layers: slice) -> "ScoreTables":
        """The constants of some layers."""
        return replace(
            self,
            mean=self.mean[layers],
            center=self.center[layers],
            spread=self.spread[layers],
            unrotated=self.unrotated[layers],
            rotates=self.rotates[layers],
        )


def build_tables(
    mean: torch.Tensor,
    abs_mean: torch.Tensor,
    inv_freq: torch.Tensor,
    attention_scaling: float,
    style: str,
    num_kv_heads: int,
    device: torch.device | str,
    *,
    unrotated: torch.Tensor | None = None,
    rotates: Sequence[bool] | None = None,
    rotary_start: int = 0,
) -> ScoreTables:
    """Prepares the constants of one model.

    Args:
        mean: [L, H_q, F] complex64, mean pre-RoPE query.
        abs_mean: [L, H_q, F] float32, mean of its absolute value; ignored in layers without RoPE.
        inv_freq: [F], radians per token; 0 for pairs of dims that RoPE leaves as they are.
        attention_scaling: RoPE's factor on cos and sin, 1.0 except for YaRN-like types; folded in, so that rotated
            and other dims have the weights that they have in the attention's logits.
        style: "half" or "interleaved", see `ScoreTables`.
        unrotated: [L, H_q, U] float32, mean query in the dims that RoPE never turns; None leaves these unscored.
        rotates: for each layer, whether RoPE turns its queries and keys; None stands for all.
        rotary_start: see `ScoreTables`.

    Raises:
        ValueError: shapes disagree, `style` is unknown, or H_q is not a multiple of `num_kv_heads`.
    """
    if mean.ndim != 3 or mean.shape != abs_mean.shape or inv_freq.shape != mean.shape[-1:]:
        raise ValueError(
            f"mean and abs_mean must be [L, H_q, F] and inv_freq [F], got {list(mean.shape)}, "
            f"{list(abs_mean.shape)} and {list(inv_freq.shape)}"
        )
    if style not in STYLES:
        raise ValueError(f"RoPE style must be one of {STYLES}, got {style!r}")
    if mean.shape[1] % num_kv_heads:
        raise ValueError(f"{mean.shape[1]} query heads cannot share {num_kv_heads} KV heads evenly")
    if unrotated is None:
        unrotated = torch.zeros(*mean.shape[:2], 0)
    if unrotated.ndim != 3 or unrotated.shape[:2] != mean.shape[:2]:
        raise ValueError(f"unrotated must be [L, H_q, U] for mean {list(mean.shape)}, got {list(unrotated.shape)}")
    if rotary_start not in (0, unrotated.shape[-1]):
        raise ValueError(f"the rotated dims begin at 0 or after all {unrotated.shape[-1]} others, got {rotary_start}")
    rotates = [True] * len(mean) if rotates is None else rotates
    if len(rotates) != len(mean):
        raise ValueError(f"rotates must have one entry for each of {len(mean)} layers, got {len(rotates)}")
    turning = torch.tensor(rotates, dtype=torch.bool)
    inv_freq = inv_freq.to("cpu", torch.float64)
    scaling = torch.where(turning, attention_scaling, 1.0).double()[:, None, None]
    mean = mean.to("cpu", torch.complex128) * scaling
    spread = (abs_mean.to("cpu", torch.float64) * scaling - mean.abs()).clamp_min(0)
    # Phases reach 65536 radians: in float32 they would be off by up to 0.004 before any key is read.
    offsets = torch.tensor(OFFSETS, dtype=torch.float64)
    angles = offsets[:, None] * inv_freq
    gain = torch.polar(torch.ones_like(angles), angles).mean(0)
    gain = torch.where(turning[:, None, None], gain, torch.ones_like(gain))  # [L, 1, F]
    return ScoreTables(
        mean=mean.to(torch.complex64).to(device),
        center=(mean * gain).to(torch.complex64).to(device),
        spread=(spread * turning[:, None, None] * (inv_freq > 0)).float().to(device),
        unrotated=unrotated.float().contiguous().to(device),
        rotates=turning.float().to(device),
        inv_freq=inv_freq.to(device),
        offsets=offsets.to(device),
        style=style,
        rotary_dim=2 * inv_freq.numel(),
        num_kv_heads=num_kv_heads,
        rotary_start=rotary_start,
    )


def check_fits(k_buffers: Sequence[torch.Tensor], tables: ScoreTables, aggregation: str) -> None:
    """Raises ValueError if the aggregation is unknown or `tables` do not describe the model of `k_buffers`."""
    if aggregation not in AGGREGATIONS:
        raise ValueError(f"aggregation must be one of {AGGREGATIONS}, got {aggregation!r}")
    layers = len(tables.spread)
    if len(k_buffers) != layers:
        raise ValueError(f"the statistics cover {layers} layers, got {len(k_buffers)} key buffers")
    _, kv_heads, head_dim = k_buffers[0].shape
    if kv_heads != tables.num_kv_heads:
        raise ValueError(f"the statistics are for {tables.num_kv_heads} KV heads, the key pool has {kv_heads}")
    if head_dim < tables.rotary_dim:
        raise ValueError(f"RoPE turns {tables.rotary_dim} dims of a head, keys in the pool have {head_dim}")
    others = tables.unrotated.shape[-1]
    if others and head_dim != tables.rotary_dim + others:
        raise ValueError(
            f"the statistics cover {tables.rotary_dim} and {others} dims of a head, keys in the pool have {head_dim}"
        )
