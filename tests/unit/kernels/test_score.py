"""Scores compared with the published reference, the spec's vectors and the definition written out in float64."""

import numpy as np
import pytest
import torch

from kernel_cases import GOLDEN_SCORES
from sglang_triattn.kernels.score import reference as score
from sglang_triattn.kernels.score.reference import OFFSETS, build_tables, phase_vectors, score_torch
from sglang_triattn.stats.file import load_stats

# The layers that the reduced statistics hold.
LAYERS = (0, 3, 10, 21, 35)
HEADS = (0, 1, 2, 3, 20, 21, 22, 23, 28, 29, 30, 31)
# layer, head, aggregation, scores of six keys by the paper's own code (see tests/golden).
SPEC_VECTORS = [
    (10, 20, "mean", [20.6082, 32.2140, 30.0219, 39.8545, 64.3067, 83.0624]),
    (10, 20, "norm", [16.5263, 24.7504, 32.1867, 41.3967, 48.9047, 57.4142]),
    (10, 20, "max", [34.0945, 52.6842, 63.1555, 69.5101, 92.0401, 113.1812]),
    (10, 21, "mean", [13.1127, 31.2626, 28.3343, 19.9644, 58.3109, 47.8042]),
    (10, 22, "mean", [20.5613, 31.6624, 43.4567, 58.3986, 84.8474, 109.2571]),
    (10, 23, "mean", [27.6134, 33.3602, 43.8832, 53.7658, 66.5219, 82.6663]),
    (10, 23, "max", [31.7108, 45.2364, 48.1297, 60.5956, 80.0730, 113.3359]),
    (0, 0, "mean", [15.8129, 26.8814, 12.6461, 6.3152, 32.8646, 71.0639]),
    (0, 0, "max", [32.2453, 40.1413, 48.3297, 50.4655, 63.3393, 102.6234]),
    (35, 31, "mean", [9.1216, 8.6229, 47.3838, 63.0894, 56.1678, 54.4382]),
    (35, 31, "norm", [17.1389, 24.9538, 36.2123, 46.4507, 59.9994, 65.4411]),
]


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


def definition(keys, positions, next_position, mean, abs_mean, inv_freq, style, scaling, aggregation):
    """Spec 2.1, term by term: scores [N] of one head for pre-RoPE keys [N, head_dim] at known positions."""
    k = pairs(keys, inv_freq.numel(), style)
    mean, abs_mean, inv_freq = mean.to(torch.complex128), abs_mean.double(), inv_freq.double()
    phi = torch.angle(mean * k.conj())
    extra = (scaling**2 * (abs_mean - mean.abs()) * k.abs()).sum(-1)
    if aggregation == "norm":
        return extra
    per_offset = []
    for offset in OFFSETS:
        distance = (next_position - positions + offset).double()[:, None]
        terms = scaling**2 * mean.abs() * k.abs() * torch.cos(inv_freq * distance + phi)
        per_offset.append(terms.sum(-1) + extra)
    stacked = torch.stack(per_offset)
    return stacked.mean(0) if aggregation == "mean" else stacked.amax(0)


class Case:
    """A random model and requests: pools, slots, and the reference's answers."""

    def __init__(self, *, lengths, layers=2, kv_heads=2, group=3, head_dim=16, rotary_dim=None, style="half",
                 scaling=1.0, dtype=torch.float32, poison=True, seed=0):  # fmt: skip
        generator = torch.Generator().manual_seed(seed)

        def randn(*shape):
            return torch.randn(*shape, generator=generator)

        half = (rotary_dim or head_dim) // 2
        self.style, self.scaling = style, scaling
        self.inv_freq = 1e4 ** (-torch.arange(half, dtype=torch.float64) / half)
        self.mean = torch.complex(randn(layers, kv_heads * group, half), randn(layers, kv_heads * group, half))
        self.abs_mean = self.mean.abs() * (1 + torch.rand(self.mean.shape, generator=generator))
        self.lengths, num_tokens, count = lengths, max(lengths), sum(lengths)
        # One slot more than tokens: slot 0, used for padding, belongs to nobody.
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
                    turned = turn(keys[layer, :, j], positions, self.inv_freq, style, scaling)
                    pools[layer][rows, j] = turned.float()
            self.raw.append((positions, keys))
        self.pools = [pool.to(dtype) for pool in pools]

    def tables(self, device="cpu"):
        kv_heads = self.pools[0].shape[1]
        return build_tables(self.mean, self.abs_mean, self.inv_freq, self.scaling, self.style, kv_heads, device)

    def check(self, aggregation: str, tolerance: float) -> None:
        result = score_torch(self.pools, self.slots, self.next_positions, self.tables(), aggregation=aggregation)
        layers, heads, _ = self.mean.shape
        assert result.dtype == torch.float32
        assert result.shape == (len(self.lengths), layers, heads, max(self.lengths))
        group = heads // self.pools[0].shape[1]
        for r, (positions, keys) in enumerate(self.raw):
            for layer in range(layers):
                for h in range(heads):
                    expected = definition(
                        keys[layer, :, h // group], positions, self.next_positions[r], self.mean[layer, h],
                        self.abs_mean[layer, h], self.inv_freq, self.style, self.scaling, aggregation,
                    )  # fmt: skip
                    got = result[r, layer, h, : self.lengths[r]].double()
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


@pytest.fixture(scope="module")
def qwen3_8b(reference_files):
    return load_stats(reference_files / "qwen3_8b.pt")


@pytest.mark.parametrize(("aggregation", "field", "tolerance"), GOLDEN_SCORES)
@pytest.mark.parametrize("name", ["qwen3_8b_a", "qwen3_8b_b"])
def test_golden_scores(reference_files, qwen3_8b, name, aggregation, field, tolerance):
    """Prevents drift from the published method on a real model's statistics."""
    golden = np.load(reference_files / f"{name}.npz")
    layers = torch.tensor(golden["layers"])
    tables = build_tables(
        qwen3_8b.mean[layers], qwen3_8b.abs_mean[layers], torch.tensor(golden["inv_freq"]), 1.0, "half",
        int(golden["num_kv_heads"]), "cpu",
    )  # fmt: skip
    pools = [keys.transpose(0, 1).contiguous() for keys in torch.tensor(golden["keys_cached"])]
    count = pools[0].shape[0]
    next_position = torch.tensor([int(golden["next_position"])])
    scores = score_torch(pools, torch.arange(count)[None], next_position, tables, aggregation=aggregation)
    torch.testing.assert_close(scores[0], torch.tensor(golden[field]), rtol=0, atol=tolerance)


@pytest.mark.parametrize("vector", SPEC_VECTORS, ids=lambda v: f"layer{v[0]}-head{v[1]}-{v[2]}")
def test_spec_vectors(qwen3_8b, vector):
    """Prevents an error shared by the golden files and this code: these vectors come from another program."""
    layer, head, aggregation, expected = vector
    layer, head = LAYERS.index(layer), HEADS.index(head)
    inv_freq = 1e6 ** (-2 * torch.arange(64, dtype=torch.float32) / 128)
    i, j = torch.arange(6, dtype=torch.float64)[:, None], torch.arange(128, dtype=torch.float64)
    keys = torch.sin(0.1 * (i + 1) * (j + 1)) * (1 + 0.5 * i)
    positions = torch.tensor([0, 17, 1000, 2999, 4095, 5999])
    pool = turn(keys, positions, inv_freq, "half", 1.0).float()[:, None]
    tables = build_tables(
        qwen3_8b.mean[layer, head][None, None], qwen3_8b.abs_mean[layer, head][None, None], inv_freq, 1.0,
        "half", 1, "cpu",
    )  # fmt: skip
    scores = score_torch([pool], torch.arange(6)[None], torch.tensor([6000]), tables, aggregation=aggregation)
    tolerance = {"mean": 1e-2, "max": 5e-2, "norm": 1e-3}[aggregation]
    torch.testing.assert_close(scores[0, 0, 0], torch.tensor(expected), rtol=0, atol=tolerance)
