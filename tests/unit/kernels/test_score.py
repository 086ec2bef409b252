"""Scores compared with the definition written out in float64."""

import pytest
import torch

from sglang_triattn.kernels.score import reference as score
from sglang_triattn.kernels.score.reference import phase_vectors, score_torch
from sglang_triattn.kernels.score.tables import OFFSETS, build_tables


def pairs(x: torch.Tensor, frequencies: int, style: str) -> torch.Tensor:
    """[..., F] complex128 from the rotating dims of `x`."""
    x = x.double()[..., : 2 * frequencies]
    if style == "half":
        return torch.complex(x[..., :frequencies], x[..., frequencies:])
    return torch.view_as_complex(x.unflatten(-1, (frequencies, 2)).contiguous())


def turn(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, style: str, scaling: float):
    """RoPE of keys `x` [N, head_dim] in float64."""
    frequencies = inv_freq.numel()
    angle = positions.double()[:, None] * inv_freq.double()
    z = pairs(x, frequencies, style) * torch.exp(1j * angle) * scaling
    turned = torch.cat([z.real, z.imag], -1) if style == "half" else torch.view_as_real(z).flatten(-2)
    return torch.cat([turned, x.double()[..., 2 * frequencies :]], -1)


def definition(keys, positions, next_position, mean, abs_mean, unrotated, inv_freq, style, scaling, aggregation):
    """Spec 2.1, term by term: scores [N] of one head for pre-RoPE keys [N, head_dim] at known positions.

    What the dims after the rotated ones add to the logit does not depend on the position, and is not scaled.
    """
    k = pairs(keys, inv_freq.numel(), style)
    mean, abs_mean, inv_freq = mean.to(torch.complex128), abs_mean.double(), inv_freq.double()
    phi = torch.angle(mean * k.conj())
    # Pairs that never turn add the mean logit alone.
    extra = (scaling**2 * (abs_mean - mean.abs()) * k.abs() * (inv_freq > 0)).sum(-1)
    if aggregation == "norm":
        return extra
    per_offset = []
    for offset in OFFSETS:
        distance = (next_position - positions + offset).double()[:, None]
        terms = scaling**2 * mean.abs() * k.abs() * torch.cos(inv_freq * distance + phi)
        per_offset.append(terms.sum(-1) + extra)
    others = keys[:, 2 * inv_freq.numel() :][:, : len(unrotated)].double()
    stacked = torch.stack(per_offset) + others @ unrotated.double()
    return stacked.mean(0) if aggregation == "mean" else stacked.amax(0)


class Case:
    """A random model and requests: pools, slots, and the reference's answers."""

    def __init__(self, *, lengths, layers=2, kv_heads=2, group=3, head_dim=16, rotary_dim=None, style="half",
                 scaling=1.0, dtype=torch.float32, poison=True, seed=0, unrotated=True, rotates=None,
                 turning=None):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        half = (rotary_dim or head_dim) // 2
        self.style, self.scaling = style, scaling
        self.inv_freq = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        self.inv_freq[turning or half :] = 0
        self.mean = torch.complex(randn(layers, kv_heads * group, half), randn(layers, kv_heads * group, half))
        self.abs_mean = self.mean.abs() * (1 + torch.rand(self.mean.shape, generator=generator))
        # Without means, the dims after the rotated ones are not scored.
        self.unrotated = randn(layers, kv_heads * group, head_dim - 2 * half) if unrotated else None
        self.rotates = rotates or [True] * layers
        self.lengths, num_tokens, count = lengths, max(lengths), sum(lengths)
        # One slot more than tokens: slot 0, used for padding, has no owner.
        order = 1 + torch.randperm(count + 5, generator=generator)[:count]
        self.slots = torch.zeros(len(lengths), num_tokens, dtype=torch.int64)
        self.next_positions = torch.tensor([100 * r + 2 * n + 3 for r, n in enumerate(lengths)])
        shape = (count + 6, kv_heads, head_dim)
        filler = torch.full(shape, float("nan") if poison else 0.0)
        pools = [filler.clone() for _ in range(layers)]
        self.raw, taken = [], 0
        for r, n in enumerate(lengths):
            positions = torch.arange(n) * 2
            rows = order[taken : taken + n]
            taken += n
            self.slots[r, :n] = rows
            keys = randn(layers, n, kv_heads, head_dim)
            for layer in range(layers):
                for j in range(kv_heads):
                    stored = keys[layer, :, j]
                    if self.rotates[layer]:
                        stored = turn(stored, positions, self.inv_freq, style, scaling)
                    pools[layer][rows, j] = stored.float()
            self.raw.append((positions, keys))
        self.pools = [pool.to(dtype) for pool in pools]

    def tables(self, device="cpu"):
        kv_heads = self.pools[0].shape[1]
        return build_tables(
            self.mean, self.abs_mean, self.inv_freq, self.scaling, self.style, kv_heads, device,
            unrotated=self.unrotated, rotates=self.rotates,
        )  # fmt: skip

    def expected(self, r: int, layer: int, head: int, aggregation: str) -> torch.Tensor:
        """[n] float64: scores of a request by their definition; without RoPE the mean logit itself."""
        positions, keys = self.raw[r]
        own = keys[layer, :, head // (self.mean.shape[1] // keys.shape[2])]
        others = self.mean.new_zeros(0).real if self.unrotated is None else self.unrotated[layer, head]
        if not self.rotates[layer]:
            mean = torch.cat([torch.view_as_real(self.mean[layer, head]).T.flatten(), others])
            if self.style == "interleaved":
                mean = torch.cat([torch.view_as_real(self.mean[layer, head]).flatten(), others])
            logit = own[:, : len(mean)].double() @ mean.double()
            return torch.zeros_like(logit) if aggregation == "norm" else logit
        return definition(
            own, positions, self.next_positions[r], self.mean[layer, head], self.abs_mean[layer, head], others,
            self.inv_freq, self.style, self.scaling, aggregation,
        )  # fmt: skip

    def check(self, aggregation: str, tolerance: float) -> None:
        result = score_torch(self.pools, self.slots, self.next_positions, self.tables(), aggregation=aggregation)
        layers, heads, _ = self.mean.shape
        assert result.dtype == torch.float32
        assert result.shape == (len(self.lengths), layers, heads, max(self.lengths))
        for r, length in enumerate(self.lengths):
            for layer in range(layers):
                for h in range(heads):
                    got = result[r, layer, h, :length].double()
                    expected = self.expected(r, layer, h, aggregation)
                    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


CASES = {
    "one-token": {"lengths": [1]},
    "G1": {"lengths": [17], "group": 1, "kv_heads": 5},
    "G7-odd-heads": {"lengths": [33], "group": 7, "kv_heads": 3},
    "one-kv-head": {"lengths": [9], "group": 4, "kv_heads": 1},
    "ragged": {"lengths": [63, 1, 15, 64]},
    "F1": {"lengths": [5], "head_dim": 2},
    "odd-F": {"lengths": [21], "head_dim": 14},
    "partial-rotary": {"lengths": [12, 7], "head_dim": 20, "rotary_dim": 10},
    "interleaved": {"lengths": [12, 7], "style": "interleaved"},
    "interleaved-partial": {"lengths": [12], "style": "interleaved", "head_dim": 20, "rotary_dim": 6},
    "yarn-scaling": {"lengths": [12, 30], "scaling": 1.3466},
    "yarn-scaling-partial": {"lengths": [12], "head_dim": 20, "rotary_dim": 12, "scaling": 1.3466},
    "more-unrotated": {"lengths": [12], "head_dim": 40, "rotary_dim": 6},
    "unscored-dims": {"lengths": [12], "head_dim": 20, "rotary_dim": 10, "unrotated": False},
    "left-alone-between": {"lengths": [12, 5], "turning": 2},
    "left-alone-interleaved": {"lengths": [12], "turning": 3, "style": "interleaved"},
    "without-rope": {"lengths": [12, 5], "layers": 3, "rotates": [True, False, True], "scaling": 1.3466},
    "no-rope-at-all": {"lengths": [12], "rotates": [False, False], "style": "interleaved"},
    "partial-without-rope": {"lengths": [12], "head_dim": 20, "rotary_dim": 10, "rotates": [False, True]},
}


@pytest.mark.parametrize("aggregation", ["mean", "max", "norm"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_scores_equal_the_definition(case, aggregation):
    """Prevents a wrong phase, group, layout or scaling, and NaN leaking in from slots of other requests."""
    Case(**case).check(aggregation, 2e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_pool_dtypes(dtype, style):
    """Prevents a low-precision key pool from being read as other numbers than it holds."""
    case = Case(lengths=[20, 9], dtype=dtype, style=style, poison=False)
    scores = score_torch(case.pools, case.slots, case.next_positions, case.tables())
    case.pools = [pool.float() for pool in case.pools]
    expected = score_torch(case.pools, case.slots, case.next_positions, case.tables())
    torch.testing.assert_close(scores, expected, rtol=0, atol=0)


@pytest.mark.parametrize("aggregation", ["mean", "max", "norm"])
@pytest.mark.parametrize("limit", [1, 20_000, 60_000])
def test_pieces_change_nothing_and_stay_small(monkeypatch, limit, aggregation):
    """Prevents workspace that grows with layers or tokens, and seams between the pieces it is bounded by."""
    case = Case(lengths=[50, 31], layers=5)
    arguments = (case.pools, case.slots, case.next_positions, case.tables())
    expected = score_torch(*arguments, aggregation=aggregation)
    sizes = []
    features = score._features

    def watched(*given):
        result = features(*given)
        sizes.append(result.numel() * 4)
        return result

    monkeypatch.setattr(score, "_features", watched)
    monkeypatch.setattr(score, "CPU_WORKSPACE_BYTES", limit)
    pieces = score_torch(*arguments, aggregation=aggregation)
    torch.testing.assert_close(pieces, expected, equal_nan=True, rtol=1e-5, atol=1e-5)
    one_column = 2 * 2 * 3 * 8 * 4  # requests, KV heads, 3F, bytes: the smallest possible piece
    assert len(sizes) > 1
    assert max(sizes) <= max(limit, one_column)


def test_no_value_is_read_on_the_host():
    """Prevents a hidden device synchronisation: tensors without data fail on any read."""
    case = Case(lengths=[8, 5])
    tables = case.tables("meta")
    pools, slots = [pool.to("meta") for pool in case.pools], case.slots.to("meta")
    for aggregation in ("mean", "max", "norm"):
        result = score_torch(pools, slots, case.next_positions.to("meta"), tables, aggregation=aggregation)
        assert result.shape == (2, 2, 6, 8)


def test_phases_stay_exact_far_out():
    """Prevents float32 phases, which are off by whole radians at long contexts."""
    case = Case(lengths=[4])
    position = 1_000_003
    vector = phase_vectors(case.tables(), torch.tensor([position]))[0]
    angles = (torch.tensor(OFFSETS, dtype=torch.float64)[:, None] + position) * case.inv_freq
    expected = case.mean.to(torch.complex128) * torch.exp(1j * angles).mean(0)
    parts = torch.cat([expected.real, expected.imag, case.abs_mean.double() - case.mean.abs().double()], -1)
    torch.testing.assert_close(vector.double(), parts, rtol=0, atol=2e-6)


def test_requests_do_not_see_one_another():
    """Prevents a batch from changing a request's scores."""
    case = Case(lengths=[40, 13])
    both = score_torch(case.pools, case.slots, case.next_positions, case.tables())
    alone = score_torch(case.pools, case.slots[1:, :13], case.next_positions[1:], case.tables())
    torch.testing.assert_close(both[1:, ..., :13], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 4}, "6 query heads"),
        ({"style": "neox"}, "RoPE style"),
        ({"inv_freq": torch.ones(3)}, r"inv_freq \[F\]"),
        ({"unrotated": torch.ones(2, 5, 4)}, "unrotated must be"),
        ({"rotates": [True]}, "one entry for each of 2 layers"),
    ],
)
def test_tables_of_impossible_models_are_refused(change, message):
    """Prevents broadcasting from hiding a head or frequency count that does not fit."""
    case = Case(lengths=[4])
    arguments = {"mean": case.mean, "abs_mean": case.abs_mean, "inv_freq": case.inv_freq, "num_kv_heads": 2}
    arguments |= {"attention_scaling": 1.0, "style": "half", "device": "cpu"} | change
    with pytest.raises(ValueError, match=message):
        build_tables(**arguments)


def test_wrong_calls_are_refused():
    """Prevents layers from being dropped, and an unknown aggregation from being taken for another."""
    case = Case(lengths=[4])
    with pytest.raises(ValueError, match="2 layers, got 1"):
        score_torch(case.pools[:1], case.slots, case.next_positions, case.tables())
    with pytest.raises(ValueError, match="aggregation"):
        score_torch(case.pools, case.slots, case.next_positions, case.tables(), aggregation="sum")
    case = Case(lengths=[4], head_dim=20, rotary_dim=10)
    with pytest.raises(ValueError, match="10 and 10 dims of a head, keys in the pool have 16"):
        score_torch([pool[..., :16] for pool in case.pools], case.slots, case.next_positions, case.tables())
