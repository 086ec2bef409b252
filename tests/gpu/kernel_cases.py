"""Random models and requests for kernel tests; scores, importance and value sizes written out in float64."""

from pathlib import Path

import numpy as np
import torch

from sglang_triattn.kernels.score.tables import OFFSETS, build_tables
from sglang_triattn.kernels.score.value_size import LEAST, NEWEST, LookUps

POISON_SLOT = (1 << 31) - 1
# Aggregation, field and tolerance of the published scores. Their phases are float32: at T + delta near 10^5 they are
# off by up to 0.008 radians. A mean over the offsets damps the high frequencies that suffer most; a maximum does not.
GOLDEN_SCORES = (("mean", "score_mean", 0.01), ("max", "score_max", 0.1), ("norm", "score_norm_only", 1e-3))


def may_race(device: str) -> bool:
    """Whether a second launch can give other bits: the interpreter runs programs one by one, in the same order."""
    return device != "cpu"


def score_tolerance(expected: torch.Tensor, device: str) -> float:
    """Largest error of a score: that of float32 sums of 3F terms grows with the size of the terms, not of the sum.

    The tensor cores of a GPU cut the addends of a sum off at the last bit of the largest: an H100 is off by up to
    5.2e-6.
    """
    return (3e-6 if device == "cpu" else 1e-5) * max(1.0, expected.abs().max().item())


def published_means(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Reads statistics as published with the paper: [L, H_q, F], mean complex64 and mean of absolute values float32."""
    heads = sorted(torch.load(path, map_location="cpu", weights_only=True)["stats"].items())
    count = sum(name.startswith("layer00_") for name, _ in heads)
    real, imag, size = (
        torch.stack([head[field].float() for _, head in heads]).unflatten(0, (-1, count))
        for field in ("q_mean_real", "q_mean_imag", "q_abs_mean")
    )
    return torch.complex(real, imag), size


def importance_reference(scores: np.ndarray, candidates: int, selection: str, kv_heads: int) -> np.ndarray:
    """[kept sets, candidates] float64: docs/method.md in plain numpy, for scores [L, H_q, n] of one request."""
    rows = scores[..., :candidates].astype(np.float64)
    z = (rows - rows.mean(-1, keepdims=True)) / np.maximum(rows.std(-1, keepdims=True), 1e-6)
    grouped = z.reshape(z.shape[0], kv_heads, -1, candidates).max(2)
    return {
        "union": z.max((0, 1))[None],
        "shared-mean": z.mean((0, 1))[None],
        "per-head": grouped.mean(0),
        "per-layer-head": grouped.reshape(-1, candidates),
    }[selection]


class KernelCase:
    """Pools of post-RoPE keys and of values, poisoned outside the requests' slots, and everything else a launch needs.

    Padded columns of `slots` point far outside the pools: reading one ends the process or yields garbage.
    """

    def __init__(self, *, lengths, device="cpu", layers=2, kv_heads=2, group=3, head_dim=64, rotary_dim=None,
                 value_dim=None, style="half", scaling=1.0, dtype=torch.float32, scales=False, seed=0,
                 unrotated=True, rotates=None, turning=None, latent=False):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        self.frequencies = half = (rotary_dim or head_dim) // 2
        # A row of latents has its rotated dims last.
        self.rotary_start = head_dim - 2 * half if latent else 0
        self.style, heads, count = style, kv_heads * group, sum(lengths)
        inv_freq = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        inv_freq[turning or half :] = 0
        self.mean = torch.complex(randn(layers, heads, half), randn(layers, heads, half)) * scaling
        abs_mean = self.mean.abs() * (1 + torch.rand(self.mean.shape, generator=generator))
        # Without means, the dims after the rotated ones are not scored.
        self.unrotated = randn(layers, heads, head_dim - 2 * half if unrotated else 0) * scaling
        self.rotates = rotates or [True] * layers
        self.tables = build_tables(
            self.mean, abs_mean, inv_freq, 1.0, style, kv_heads, device, unrotated=self.unrotated, rotates=rotates,
            rotary_start=self.rotary_start,
        )  # fmt: skip
        self.spread, self.inv_freq = abs_mean.double() - self.mean.abs().double(), inv_freq
        self.spread[~torch.tensor(self.rotates)] = 0
        self.spread[..., turning or half :] = 0
        order = torch.randperm(count + 9, generator=generator)
        slots = torch.full((len(lengths), max(lengths)), POISON_SLOT)
        pool = torch.full((layers, count + 9, kv_heads, head_dim), float("nan"))
        taken = 0
        for row, length in zip(slots, lengths, strict=True):
            row[:length] = order[taken : taken + length]
            pool[:, row[:length]] = randn(layers, length, kv_heads, head_dim)
            taken += length
        values = torch.full((layers, count + 9, kv_heads, value_dim or head_dim), float("nan"))
        self.scales = 0.5 + torch.rand(layers, generator=generator) if scales else None
        self.pools = [keys.to(device) for keys in pool.to(dtype)]
        for row, length in zip(slots, lengths, strict=True):
            values[:, row[:length]] = randn(layers, length, *values.shape[2:])
        self.value_pools = [values.to(device) for values in values.to(dtype)]
        self.slots, self.lengths = slots.to(device), torch.tensor(lengths, device=device)
        self.next_positions = torch.tensor([1000 * r + 2 * n + 3 for r, n in enumerate(lengths)], device=device)

    def lookups(self, seed: int = 7) -> LookUps:
        """Random weights for what the pools hold, large enough to decide against distances."""
        layers, kv_heads, width = len(self.pools), self.pools[0].shape[1], self.value_pools[0].shape[2]
        drawn = torch.randn(layers, kv_heads, self.frequencies + width, generator=torch.Generator().manual_seed(seed))
        return LookUps(drawn.to(self.pools[0].device), self.pools, self.style)

    def expected_sizes(
        self, request: int, recent: int, lookups: LookUps | None = None, recency: float = 0.0
    ) -> torch.Tensor:
        """[L, H_kv, n] float64: squared distances of a request's values, as the pool holds them, from the center; with
        `lookups` their logarithms and twice what the weights say of keys and of these values. Values are divided by the
        power `recency` of their rank."""
        slots = self.slots[request, : int(self.lengths[request])].cpu()
        values = torch.stack([pool.cpu().float()[slots] for pool in self.value_pools]).double()  # [L, n, H_kv, d]
        if recent:
            values = values - values[:, -min(recent, NEWEST) :].mean(1, keepdim=True)
        ranks = torch.arange(len(slots), 0, -1).double()
        found = values.square().sum(-1).transpose(1, 2)
        if lookups is None:
            return found / ranks.pow(2 * recency)
        keys = torch.stack([pool.cpu().float()[slots] for pool in self.pools]).double()[..., : 2 * self.frequencies]
        pairs = keys.unflatten(-1, (2, -1)) if self.style == "half" else keys.unflatten(-1, (-1, 2)).mT
        features = torch.cat([torch.hypot(*pairs.unbind(-2)), values], -1)
        strengths = torch.einsum("lnhf,lhf->lhn", features, lookups.weights.cpu().double())
        return found.clamp_min(LEAST).log() + 2 * (strengths - recency * ranks.log())

    def expected(self, request: int, aggregation: str) -> torch.Tensor:
        """[L, H_q, n] float64: the score term by term, from the keys as the pool holds them."""
        n = int(self.lengths[request])
        slots = self.slots[request, :n].cpu()
        keys = torch.stack([pool.cpu().float()[slots] for pool in self.pools]).double()  # [L, n, H_kv, d]
        if self.scales is not None:
            keys = keys * self.scales.double()[:, None, None, None]
        group = self.mean.shape[1] // keys.shape[2]
        keys = keys.roll(-self.rotary_start, dims=-1)
        others = keys[..., 2 * self.frequencies :][..., : self.unrotated.shape[-1]].repeat_interleave(group, dim=2)
        fixed = torch.einsum("lnhu,lhu->lhn", others, self.unrotated.double())
        keys = keys[..., : 2 * self.frequencies]
        if self.style == "half":
            z = torch.complex(*keys.chunk(2, -1))
        else:
            z = torch.view_as_complex(keys.unflatten(-1, (-1, 2)).contiguous())
        z = z.repeat_interleave(group, dim=2)  # [L, n, H_q, F]
        extra = torch.einsum("lnhf,lhf->lhn", z.abs(), self.spread)
        if aggregation == "norm":
            return extra
        best = []
        for offset in OFFSETS:
            turn = torch.exp(1j * self.inv_freq * (int(self.next_positions[request]) + offset))
            turn = torch.stack([turn if rotates else torch.ones_like(turn) for rotates in self.rotates])[:, None]
            best.append(torch.einsum("lnhf,lhf->lhn", z.conj(), self.mean.to(torch.complex128) * turn).real)
        stacked = torch.stack(best)
        return (stacked.mean(0) if aggregation == "mean" else stacked.amax(0)) + extra + fixed
