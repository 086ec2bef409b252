"""Value sizes by kernel and reference, compared with their definition in float64."""

import functools

import pytest
import torch

from kernel_cases import KernelCase
from sets import matrix
from sglang_triattn.kernels.pools import key_pools
from sglang_triattn.kernels.score.value_size import NEWEST, value_size_torch
from sglang_triattn.kernels.score.value_size_kernel import TOKENS, value_size_triton

SENTINEL = -12345.0

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = {
    "one-token": {"lengths": [9], "kv_heads": 1},
    "ragged": {"lengths": [71, 9, 64, 10, 130]},
    "qwen3": {"lengths": [40, 33], "layers": 3, "kv_heads": 8, "group": 1, "value_dim": 128, "dtype": torch.bfloat16},
    "mimo-v2": {"lengths": [40, 33], "kv_heads": 4, "head_dim": 192, "value_dim": 128, "dtype": torch.bfloat16},
    "wider-than-keys": {"lengths": [30], "value_dim": 256},
    "narrower-than-keys": {"lengths": [30], "value_dim": 16, "dtype": torch.bfloat16},
    "several-programs": {"lengths": [TOKENS + 9, TOKENS + 8, TOKENS + 10, 3 * TOKENS], "layers": 1, "head_dim": 8},
}


def sizes_of(case: KernelCase, recent: int, slots=None, buffers=None, lookups=None, recency=0.0) -> torch.Tensor:
    """Sizes by the kernel, in memory that shows what was not written."""
    slots = case.slots if slots is None else slots
    buffers = buffers or case.value_pools
    shape = (len(slots), len(buffers), buffers[0].shape[1], slots.shape[1])
    sizes = torch.full(shape, SENTINEL, device=slots.device)
    keys = None if lookups is None else key_pools(lookups.k_buffers)
    options = {"sizes": sizes, "keys": keys, "lookups": lookups, "recency": recency}
    return value_size_triton(key_pools(buffers), slots, case.lengths, recent, **options)


def check(case: KernelCase, recent: int = 8, lookups=None, recency: float = 0.0) -> None:
    sizes = sizes_of(case, recent, lookups=lookups, recency=recency)
    assert torch.equal(sizes, sizes_of(case, recent, lookups=lookups, recency=recency))
    slots = torch.where(case.slots < len(case.value_pools[0]), case.slots, 0)
    reference = value_size_torch(case.value_pools, slots, case.lengths, recent, lookups, recency).cpu()
    sizes = sizes.cpu()
    assert reference.shape == sizes.shape
    for r, length in enumerate(case.lengths.tolist()):
        expected = case.expected_sizes(r, recent, lookups, recency)
        candidates = length - recent
        # Sums of weighed sizes are as exact as their largest terms.
        close = functools.partial(torch.testing.assert_close, rtol=3e-6, atol=1e-6 if lookups is None else 1e-4)
        close(sizes[r, ..., :candidates].double(), expected[..., :candidates])
        close(reference[r, ..., :length].double(), expected)
        assert (sizes[r, ..., candidates:] == SENTINEL).all()


@pytest.mark.parametrize(
    ("value_dim", "dtype"),
    matrix([16, 32, 48, 64, 80, 96, 128, 160, 192, 256, 576, 1024], DTYPES, strength=1),
    ids=str,
)
def test_every_dtype_and_width(device, dtype, value_dim):
    """Prevents a dtype or head size from being decoded or masked wrongly, and poison from leaking."""
    check(KernelCase(lengths=[37, 11], device=device, dtype=dtype, head_dim=16, value_dim=value_dim, seed=value_dim))


@pytest.mark.parametrize(("shape", "recent"), matrix(list(SHAPES), [0, 1, 8, 9], strength=1))
def test_shapes(device, shape, recent):
    """Prevents a wrong row in a ragged batch, seams between programs, and reading values that decide nothing."""
    check(KernelCase(device=device, **SHAPES[shape]), recent)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "style", "dtype"),
    matrix([16, 48, 64, 80, 128, 256], [None, 10, 16], ["half", "interleaved"], DTYPES, strength=1),
    ids=str,
)
def test_look_ups(device, head_dim, rotary_dim, style, dtype):
    """Prevents keys of another head or layer, pairs of other dims, dims that do not turn, and tiles counted twice."""
    case = KernelCase(
        lengths=[37, 11, TOKENS + 20], device=device, head_dim=head_dim, rotary_dim=rotary_dim, value_dim=32,
        style=style, dtype=dtype,
    )  # fmt: skip
    check(case, lookups=case.lookups())


@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("recency", [0.25, 1.0])
def test_recency(device, recency, weighed):
    """Prevents ranks that count from a batch's longest row, or that leave out the newest tokens."""
    case = KernelCase(lengths=[37, 11, TOKENS + 20], device=device, head_dim=48, value_dim=32)
    check(case, lookups=case.lookups() if weighed else None, recency=recency)


def test_look_ups_of_equal_values(device):
    """Prevents the logarithm of nothing: of values that equal the center, keys alone decide."""
    case = KernelCase(lengths=[70], device=device)
    for pool in case.value_pools:
        pool[case.slots[0]] = 1.0
    lookups = case.lookups()
    sizes = sizes_of(case, 4, lookups=lookups)[0, ..., :66]
    assert torch.isfinite(sizes).all()
    expected = case.expected_sizes(0, 4, lookups)[..., :66]
    torch.testing.assert_close(sizes.cpu().double(), expected, rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("value_dim", [16, 272])
def test_values_that_are_not_weighed(device, value_dim):
    """Prevents a kernel that nothing has compiled, or that spills."""
    case = KernelCase(lengths=[11], device=device, value_dim=value_dim)
    with pytest.raises(ValueError, match=f"kernels weigh values of 32 to 256 dims, got {value_dim}"):
        sizes_of(case, 4, lookups=case.lookups())


@pytest.mark.parametrize("recent", [NEWEST - 1, NEWEST, NEWEST + 1, 2 * NEWEST])
def test_the_center(device, recent):
    """Prevents a center of tokens other than the newest, of too many of them, or of another request's."""
    check(KernelCase(lengths=[3 * NEWEST, 2 * NEWEST, TOKENS + NEWEST], device=device, head_dim=16), recent)


@pytest.mark.parametrize("kernel", [True, False])
def test_a_request_does_not_notice_its_batch(device, kernel):
    """Prevents the width of a batch from changing a size by a single bit."""
    case = KernelCase(lengths=[130, 590, 70], device=device, head_dim=48)
    slots = torch.where(case.slots < len(case.value_pools[0]), case.slots, 0)
    together = sizes_of(case, 3) if kernel else value_size_torch(case.value_pools, slots, case.lengths, 3)
    for r, length in enumerate((130, 590, 70)):
        alone = KernelCase(lengths=[130, 590, 70], device=device, head_dim=48)
        alone.slots, alone.lengths = slots[r : r + 1, :length], case.lengths[r : r + 1]
        sizes = sizes_of(alone, 3) if kernel else value_size_torch(alone.value_pools, alone.slots, alone.lengths, 3)
        assert torch.equal(sizes[0, ..., : length - 3], together[r, ..., : length - 3])


def test_long_rows_of_the_reference():
    """Prevents a seam where the reference processes a long row in pieces."""
    pools = [torch.randn(9000, 2, 64, generator=torch.Generator().manual_seed(1)) for _ in range(2)]
    slots = torch.randperm(9000, generator=torch.Generator().manual_seed(2))[None]
    sizes = value_size_torch(pools, slots, torch.tensor([9000]), 100)
    for layer, pool in enumerate(pools):
        values = pool[slots[0]]
        assert torch.equal(sizes[0, layer], (values - values[-NEWEST:].mean(0)).square().sum(-1).T)


def test_slots_of_either_integer_type(device):
    """Prevents SGLang's int32 rows from being read as something else."""
    case = KernelCase(lengths=[70], device=device)
    assert torch.equal(sizes_of(case, 4), sizes_of(case, 4, slots=case.slots.int()))
    assert torch.equal(
        value_size_torch(case.value_pools, case.slots, case.lengths, 4),
        value_size_torch(case.value_pools, case.slots.int(), case.lengths, 4),
    )


def test_pools_with_gaps(device):
    """Prevents the assumption that tokens or heads follow one another without a gap, or that rows are dense."""
    case = KernelCase(lengths=[40, 30], device=device, dtype=torch.bfloat16)
    wide = [torch.full((len(p), 4, 128), float("nan"), dtype=p.dtype, device=device) for p in case.value_pools]
    for target, pool in zip(wide, case.value_pools, strict=True):
        target[:, ::2, :64] = pool
    rows = torch.nn.functional.pad(case.slots, (0, 5))[:, : case.slots.shape[1]]
    views = [w[:, ::2, :64] for w in wide]
    assert torch.equal(sizes_of(case, 4, slots=rows, buffers=views), sizes_of(case, 4))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_every_byte_of_float8(device, dtype):
    """Prevents subnormal, infinite or missing numbers from being decoded as others."""
    case = KernelCase(lengths=[256], device=device, layers=1, kv_heads=1, head_dim=16)
    pool = torch.zeros(len(case.pools[0]), 1, 16, dtype=torch.uint8, device=device)
    pool[case.slots[0], 0, 3] = torch.arange(256, dtype=torch.uint8, device=device)
    stored = pool.view(dtype)
    got = sizes_of(case, 0, buffers=[stored])
    expected = stored[case.slots[0], 0, 3].float().square()
    torch.testing.assert_close(got[0, 0, 0], expected, rtol=1e-6, atol=0, equal_nan=True)
    torch.testing.assert_close(
        value_size_torch([stored], case.slots, case.lengths, 0)[0, 0, 0], expected, equal_nan=True
    )


def test_slots_beyond_two_billion_elements(device):
    """Prevents 32-bit offsets. The pool is never filled: only the pages of used slots are ever backed by memory."""
    case = KernelCase(lengths=[6], device=device, dtype=torch.float8_e4m3fn, layers=1, kv_heads=1)
    count = (1 << 31) // 64 + 100
    pool = torch.empty(count, 1, 64, dtype=torch.uint8, device=device)
    far = torch.arange(count - 6, count, device=device)[None]
    pool[far[0]] = case.value_pools[0].view(torch.uint8)[case.slots[0]]
    got = sizes_of(case, 1, slots=far, buffers=[pool.view(torch.float8_e4m3fn)])
    assert torch.equal(got, sizes_of(case, 1))
