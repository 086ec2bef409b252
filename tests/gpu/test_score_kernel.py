"""The score kernel, compared with its definition in float64, for every dtype and shape that it is shipped for."""

import numpy as np
import pytest
import torch

from kernel_cases import GOLDEN_SCORES, KernelCase, may_race, published_means, score_tolerance
from sets import matrix, wide
from sglang_triattn.kernels.pools import key_pools
from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.score.score_kernel import score_triton
from sglang_triattn.kernels.score.tables import build_tables

SENTINEL = -12345.0

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
GROUPS = [*range(1, 17)]
# Every dtype with every head_dim and, along the way, every group size.
CROSS = [
    (dtype, head_dim, GROUPS[(5 * i + 3 * j) % 16])
    for i, dtype in enumerate(DTYPES)
    for j, head_dim in enumerate((64, 80, 96, 128, 256))
]

SHAPES = {
    "one-token": {"lengths": [1]},
    "ragged": {"lengths": [63, 1, 70, 64], "kv_heads": 1},
    "smollm2": {"lengths": [33, 20], "layers": 1, "group": 3, "kv_heads": 3},
    "qwen2.5": {"lengths": [33], "layers": 1, "group": 7, "kv_heads": 4, "head_dim": 128},
    "one-kv-head": {"lengths": [9], "group": 8, "kv_heads": 1},
    "partial-rotary": {"lengths": [40, 7], "head_dim": 128, "rotary_dim": 64},
    "odd-partial-rotary": {"lengths": [40, 7], "head_dim": 80, "rotary_dim": 20},
    "tiny-head": {"lengths": [5], "head_dim": 6},
    "interleaved": {"lengths": [70, 7], "style": "interleaved"},
    "interleaved-odd-heads": {"lengths": [12], "style": "interleaved", "head_dim": 80, "group": 5},
    "interleaved-partial": {"lengths": [12], "style": "interleaved", "head_dim": 96, "rotary_dim": 32},
    "three-tiles": {"lengths": [20], "layers": 1, "kv_heads": 1, "head_dim": 192, "dtype": torch.float16},
    "interleaved-wide": {
        "lengths": [20],
        "layers": 1,
        "style": "interleaved",
        "kv_heads": 1,
        "group": 9,
        "head_dim": 256,
        "dtype": torch.bfloat16,
    },
    "yarn-scaling": {"lengths": [30], "scaling": 1.3466},
    "glm-4.5": {
        "lengths": [35, 7],
        "layers": 1,
        "kv_heads": 2,
        "group": 12,
        "head_dim": 128,
        "rotary_dim": 64,
        "dtype": torch.bfloat16,
    },
    "mimo-v2": {
        "lengths": [35, 7],
        "layers": 1,
        "kv_heads": 2,
        "group": 16,
        "head_dim": 192,
        "rotary_dim": 64,
        "dtype": torch.bfloat16,
    },
    "unscored-dims": {"lengths": [40], "head_dim": 64, "rotary_dim": 32, "unrotated": False},
    "odd-unrotated": {"lengths": [20, 3], "head_dim": 56, "rotary_dim": 32, "dtype": torch.float16},
    "few-unrotated": {"lengths": [20], "head_dim": 40, "rotary_dim": 36},
    "more-unrotated-than-a-tile": {"lengths": [20], "layers": 1, "head_dim": 192, "rotary_dim": 64},
    "unrotated-fp8": {"lengths": [30], "head_dim": 80, "rotary_dim": 32, "dtype": torch.float8_e4m3fn, "scales": True},
    "wide-rotary": {"lengths": [20], "layers": 1, "head_dim": 128, "rotary_dim": 96, "dtype": torch.bfloat16},
    "layers-without-rope": {"lengths": [40, 7], "layers": 3, "rotates": [True, False, True]},
    "no-layer-with-rope": {"lengths": [20], "rotates": [False, False], "dtype": torch.bfloat16},
    "tiles-without-rope": {"lengths": [20], "kv_heads": 1, "head_dim": 192, "rotates": [False, True]},
    "partial-without-rope": {
        "lengths": [20],
        "style": "interleaved",
        "head_dim": 80,
        "rotary_dim": 32,
        "rotates": [False, True],
        "dtype": torch.bfloat16,
    },
    "gemma-4": {
        "lengths": [20],
        "layers": 1,
        "kv_heads": 1,
        "group": 8,
        "head_dim": 512,
        "turning": 64,
        "dtype": torch.bfloat16,
    },
    "six-tiles": {"lengths": [20], "layers": 1, "kv_heads": 1, "head_dim": 320, "group": 2, "dtype": torch.bfloat16},
    "odd-tiles": {"lengths": [20], "layers": 1, "kv_heads": 1, "head_dim": 300, "group": 2},
    "interleaved-fp8": {"lengths": [30], "style": "interleaved", "dtype": torch.float8_e4m3fn, "scales": True},
}


def launch(case: KernelCase, aggregation: str, recent: int = 0, slots=None, buffers=None):
    """Scores and moments, in buffers that show what was not written."""
    layers, heads, _ = case.mean.shape
    slots = case.slots if slots is None else slots
    requests, num_tokens = slots.shape
    scores = torch.full((requests, layers, heads, num_tokens), SENTINEL, device=slots.device)
    pools = key_pools(buffers or case.pools, case.scales)
    arguments = (pools, slots, case.lengths, case.next_positions, case.tables, recent)
    return score_triton(*arguments, aggregation=aggregation, scores=scores)


def check(case: KernelCase, aggregation: str, recent: int = 0) -> None:
    scores, moments = (x.cpu() for x in launch(case, aggregation, recent))
    if may_race(case.slots.device.type):
        again, moments_again = (x.cpu() for x in launch(case, aggregation, recent))
        assert torch.equal(scores, again)
        assert torch.equal(moments, moments_again)
    for r, length in enumerate(case.lengths.tolist()):
        candidates = max(length - recent, 0)
        expected = case.expected(r, aggregation)[..., :candidates]
        tolerance = score_tolerance(expected, case.slots.device.type)
        torch.testing.assert_close(scores[r, ..., :candidates].double(), expected, rtol=0, atol=tolerance)
        assert (scores[r, ..., candidates:] == SENTINEL).all()
        for c in range(moments.shape[3]):
            part = expected[..., c * CHUNK : (c + 1) * CHUNK]
            if not part.shape[-1]:
                continue
            torch.testing.assert_close(moments[r, ..., c, 0].double(), part.mean(-1), rtol=0, atol=tolerance)
            square = part.sub(part.mean(-1, keepdim=True)).square().sum(-1)
            torch.testing.assert_close(moments[r, ..., c, 1].double(), square, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "cross",
    [*CROSS, *(wide((torch.bfloat16, 64, group)) for group in GROUPS)],
    ids=lambda c: f"{str(c[0])[6:]}-D{c[1]}-G{c[2]}",
)
def test_every_dtype_and_shape(device, cross):
    """Prevents a dtype, head size or group size from being decoded, padded or masked wrongly; poison from leaking."""
    dtype, head_dim, group = cross
    kv_heads = 1 if group > 4 else 2
    scales = dtype.itemsize == 1
    case = KernelCase(lengths=[67, 10], device=device, dtype=dtype, head_dim=head_dim, group=group, kv_heads=kv_heads,
                      layers=2, scales=scales, seed=head_dim + group)  # fmt: skip
    check(case, "mean", recent=7)


@pytest.mark.parametrize(("dtype", "others"), matrix(DTYPES, [8, 24, 48, 64, 72], strength=1), ids=str)
def test_every_dtype_with_unrotated_dims(device, dtype, others):
    """Prevents dims after the rotated ones from being decoded, padded or masked wrongly, or left out."""
    case = KernelCase(lengths=[37, 10], device=device, dtype=dtype, head_dim=32 + others, rotary_dim=32, group=5,
                      scales=dtype.itemsize == 1, seed=others)  # fmt: skip
    check(case, "mean", recent=3)


@pytest.mark.parametrize("where", [3, 40, 79])
def test_a_key_with_nan_has_a_score_of_nan(device, where):
    """Prevents a NaN in any dim of a key, rotated or not, from turning into a number."""
    case = KernelCase(lengths=[9], device=device, head_dim=80, rotary_dim=32)
    for pool in case.pools:
        pool[case.slots[0, 4], :, where] = float("nan")
    scores, _ = launch(case, "mean")
    assert scores[0, ..., 4].isnan().all()
    assert scores[0].isnan().sum() == scores[0, ..., 4].numel()


@pytest.mark.parametrize(
    ("group", "aggregation"),
    # Smaller groups are in CROSS. Seventeen offsets take the interpreter a long time.
    [
        *((group, "mean") for group in (16, 17, 71)),
        *(wide(group, "mean") for group in (24, 32, 48)),
        *((71, "norm"), wide(17, "norm"), (3, "max"), wide(17, "max")),
    ],
)
def test_groups_are_spread_over_programs(device, group, aggregation):
    """Prevents a limit on the query heads per KV head, and heads scored by no program or by another group's."""
    dtype = torch.float8_e5m2 if group == 24 else torch.bfloat16
    lengths, layers = ([12], 1) if aggregation == "max" else ([35, 6], 2)
    case = KernelCase(lengths=lengths, layers=layers, device=device, group=group, dtype=dtype, seed=group)
    check(case, aggregation, recent=3)


# With one of each kind: whole and partial rotation, either style, one tile and more. Others take minutes interpreted.
AGGREGATED = ("ragged", "partial-rotary", "interleaved", "three-tiles", "layers-without-rope")


@pytest.mark.parametrize(
    ("shape", "aggregation"),
    [
        *((shape, "mean") for shape in SHAPES),
        *((shape, how) if shape in AGGREGATED else wide(shape, how) for shape in SHAPES for how in ("max", "norm")),
    ],
)
def test_shapes_and_aggregations(device, shape, aggregation):
    """Prevents a wrong phase, pairing or row in a ragged batch."""
    check(KernelCase(device=device, **SHAPES[shape]), aggregation)


def test_more_than_one_chunk(device):
    """Prevents seams between programs, and statistics that count the newest tokens."""
    lengths = [2 * CHUNK + 1, CHUNK, CHUNK - 1, CHUNK + 3]
    case = KernelCase(lengths=lengths, device=device, layers=1, kv_heads=1, group=2)
    check(case, "mean", recent=5)


def test_a_request_does_not_notice_its_batch(device):
    """Prevents the width of a batch from changing a request's scores or sums by a single bit."""
    case = KernelCase(lengths=[130, 1090, 70], device=device, layers=1, kv_heads=1)
    scores, moments = launch(case, "mean", 3)
    case.slots, case.lengths, case.next_positions = case.slots[:1, :130], case.lengths[:1], case.next_positions[:1]
    alone, alone_moments = launch(case, "mean", 3)
    assert torch.equal(scores[:1, ..., :130], alone)
    assert torch.equal(moments[:1, ..., :1, :], alone_moments)


def test_slots_of_either_integer_type(device):
    """Prevents SGLang's int32 rows from being read as something else."""
    case = KernelCase(lengths=[70], device=device)
    wide, _ = launch(case, "mean")
    narrow, _ = launch(case, "mean", slots=case.slots.int())
    assert torch.equal(wide, narrow)


@pytest.mark.parametrize("rotary_dim", [None, 32, 40])
def test_pools_with_gaps(device, rotary_dim):
    """Prevents the assumption that tokens or heads follow one another without a gap, or that rows are dense."""
    case = KernelCase(lengths=[40, 30], device=device, dtype=torch.bfloat16, rotary_dim=rotary_dim)
    expected, _ = launch(case, "mean")
    wide = [torch.full((len(p), 4, 128), float("nan"), dtype=p.dtype, device=device) for p in case.pools]
    for target, pool in zip(wide, case.pools, strict=True):
        target[:, ::2, :64] = pool
    rows = torch.nn.functional.pad(case.slots, (0, 5))[:, : case.slots.shape[1]]
    views = [w[:, ::2, :64] for w in wide]
    got, _ = launch(case, "mean", slots=rows, buffers=views)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_byte_of_float8(device, dtype):
    """Prevents subnormal, infinite or missing numbers from being decoded as others, and signs from being lost."""
    case = KernelCase(lengths=[256], device=device, layers=1, kv_heads=1, group=1, head_dim=16, dtype=dtype)
    bytes_ = torch.arange(256, dtype=torch.uint8, device=device)
    # One number per key, so that an infinite one spoils no other.
    pool = torch.zeros(len(case.pools[0]), 1, 16, dtype=torch.uint8, device=device)
    pool[case.slots[0], 0, 3] = bytes_
    stored = pool.view(dtype)
    got, _ = launch(case, "mean", buffers=[stored])
    expected, _ = launch(case, "mean", buffers=[stored.float()])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)
    assert torch.equal(got[0, 0, 0].isfinite(), bytes_.view(dtype).float().isfinite())


def test_slots_beyond_two_billion_elements(device):
    """Prevents 32-bit offsets. The pool is never filled: only the pages of used slots are ever backed by memory."""
    case = KernelCase(lengths=[6], device=device, dtype=torch.float8_e4m3fn, layers=1, kv_heads=1)
    expected, _ = launch(case, "mean")
    count = (1 << 31) // 64 + 100
    pool = torch.empty(count, 1, 64, dtype=torch.uint8, device=device)
    far = torch.arange(count - 6, count, device=device)[None]
    pool[far[0]] = case.pools[0].view(torch.uint8)[case.slots[0]]
    got, _ = launch(case, "mean", slots=far, buffers=[pool.view(torch.float8_e4m3fn)])
    assert torch.equal(got, expected)


def test_unusable_pools_are_refused(device):
    """Prevents scoring a pool that the kernel would misread."""
    pool = torch.zeros(8, 2, 64, device=device)
    for pools, message in (
        ([pool.double()], "float64"),
        ([pool, pool.bfloat16()], "one dtype"),
        ([pool.transpose(1, 2)], "adjacent"),
        ([torch.zeros(1025, device=device)[1:].view(8, 2, 64)], "16 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            key_pools(pools)


@pytest.mark.parametrize(
    ("name", "published"), matrix(["qwen3_8b_a", "qwen3_8b_b"], GOLDEN_SCORES, strength=1), ids=str
)
def test_golden_scores(device, reference_files, name, published):
    """Prevents drift from the published method on a real model's statistics."""
    aggregation, field, tolerance = published
    golden = np.load(reference_files / f"{name}.npz")
    mean, abs_mean = published_means(reference_files / "qwen3_8b.pt")
    layers, kv_heads = torch.tensor(golden["layers"]), int(golden["num_kv_heads"])
    inv_freq = torch.tensor(golden["inv_freq"])
    tables = build_tables(mean[layers], abs_mean[layers], inv_freq, 1.0, "half", kv_heads, device)
    pools = [keys.transpose(0, 1).contiguous().to(device) for keys in torch.tensor(golden["keys_cached"])]
    # Seventeen offsets take the interpreter a long time; a key's score does not depend on other keys.
    count = 40 if aggregation == "max" else pools[0].shape[0]
    slots, lengths = torch.arange(count, device=device)[None], torch.tensor([count], device=device)
    position = torch.tensor([int(golden["next_position"])], device=device)
    scores, _ = score_triton(key_pools(pools), slots, lengths, position, tables, 0, aggregation=aggregation)
    torch.testing.assert_close(scores[0].cpu(), torch.tensor(golden[field])[..., :count], rtol=0, atol=tolerance)
