"""The kernels that list and make moves, compared with their references byte for byte."""

import pytest
import torch

from sets import matrix, wide
from sglang_triattn.kernels.compact.list_moves_kernel import BLOCK, list_moves_triton
from sglang_triattn.kernels.compact.move_kernel import move_triton
from sglang_triattn.kernels.compact.reference import list_moves, move_torch
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.pools import key_pools

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def make_case(device, *, lengths, keep, sets, recent=0, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, spread=1,
              seed=0):  # fmt: skip
    """Pools of random bytes, slots at multiples of `spread`, and kept sets, each with the newest `recent` tokens."""
    generator = torch.Generator().manual_seed(seed)
    count, width = sum(lengths) * spread + 3, torch.empty(0, dtype=dtype).element_size()
    shape = (2 * layers, count, heads, head_dim * width)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    order = torch.randperm(sum(lengths), generator=generator) * spread
    slots, kept = torch.full((len(lengths), max(lengths)), 1 << 40), []
    for row, length in zip(slots, lengths, strict=True):
        row[:length], order = order[:length], order[length:]
        older = torch.rand(layers, heads, length - recent, generator=generator).argsort(-1)[..., : keep - recent]
        newest = torch.arange(length - recent, length).expand(layers, heads, -1)
        kept.append(torch.cat([older, newest], -1).sort(-1).values)
    kept = torch.stack(kept)
    kept = {"shared": kept[:, 0, 0], "per-head": kept[:, 0], "per-layer-head": kept}[sets]
    return [pool.to(device).view(dtype) for pool in raw], slots.to(device), kept.contiguous().to(device)


def check(pools, slots, kept, strategy, **options):
    sources, targets = list_moves_triton(slots, kept, strategy, **options)
    for one, other in zip((sources, targets), list_moves(slots.int(), kept, strategy, **options), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    expected, found = [pool.clone() for pool in pools], [pool.clone() for pool in pools]
    half = len(pools) // 2
    move_torch(expected[:half], sources, targets)
    move_torch(expected[half:], sources, targets)
    move_triton(key_pools(found), sources, targets, layers=half, ordered=strategy == "slide")
    assert any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, pools, strict=True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("strategy", ["slide", "fill"])
@pytest.mark.parametrize("sets", ["shared", "per-head", "per-layer-head"])
def test_moves_equal_the_reference(device, sets, strategy):
    """Prevents rows of another head, layer or request, and rows overwritten before they are read."""
    check(*make_case(device, lengths=[40, 33, 90], keep=33, sets=sets), strategy)


@pytest.mark.parametrize(
    ("where", "sets"),
    matrix([(1, 32), (13, 20), (13, 17), (20, 0)], ["shared", "per-head", "per-layer-head"], strength=1),
)
def test_moves_around_a_cut_equal_the_reference(device, where, sets):
    """Prevents rows of unequal length from being cut at another row's end, newest tokens from moving, and tokens that
    go to the right from being overwritten before they are read."""
    (recent, cut), lengths = where, [40, 34, 90]
    case = make_case(device, lengths=lengths, keep=33, sets=sets, recent=recent)
    for strategy in ("slide", "fill"):
        check(*case, strategy, cut=cut, lengths=torch.tensor(lengths, device=device))


@pytest.mark.parametrize(("head_dim", "dtype"), matrix([64, 80, 96, 128, 256], DTYPES, strength=1), ids=str)
def test_every_dtype_and_width(device, dtype, head_dim):
    """Prevents a head's last words from being lost if its size is not a power of two."""
    check(*make_case(device, lengths=[20, 11], keep=9, sets="per-head", head_dim=head_dim, dtype=dtype), "slide")


@pytest.mark.parametrize("strategy", ["slide", "fill"])
def test_keys_wider_than_values(device, strategy):
    """Prevents values from being moved by the width of keys, as in MiMo-V2."""
    keys, slots, kept = make_case(device, lengths=[40, 33], keep=20, sets="per-layer-head", head_dim=192)
    values, _, _ = make_case(device, lengths=[40, 33], keep=20, sets="per-layer-head", head_dim=128, seed=1)
    pairs = []
    for kernels in (True, False):
        k, v = ([pool.clone() for pool in pools[:2]] for pools in (keys, values))
        Mover(k, v, kernels=kernels).move(slots.int(), kept, strategy)
        pairs.append([*k, *v])
    assert all(not torch.equal(a, b) for a, b in zip(pairs[0], [*keys[:2], *values[:2]], strict=True))
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("keep", [1, 64, 65, 200])
def test_several_blocks(device, keep):
    """Prevents a block from reading what a later or earlier one writes."""
    check(*make_case(device, lengths=[260, 201], keep=keep, sets="shared", layers=1, heads=1), "slide")


def test_many_heads_of_one_set(device):
    """Prevents shared sets from being read as sets per head."""
    check(*make_case(device, lengths=[30], keep=12, sets="shared", heads=5, layers=3), "fill")


def test_nothing_to_move(device):
    """Prevents a launch of no moves from failing."""
    pools, slots, kept = make_case(device, lengths=[8], keep=8, sets="shared")
    before = [pool.clone() for pool in pools]
    sources, targets = list_moves_triton(slots, kept, "fill")
    move_triton(key_pools(pools), sources, targets, layers=2, ordered=False)
    # Only the newest tokens stay, and they move up in the row.
    lengths = torch.tensor([8], device=device)
    sources, targets = list_moves_triton(slots, kept[:, 3:], "fill", cut=0, lengths=lengths)
    assert torch.equal(sources, targets)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pools, before, strict=True))


@pytest.mark.parametrize("strategy", ["slide", "fill"])
@pytest.mark.parametrize(
    ("length", "keep"), [wide(2 * BLOCK + 9, BLOCK + 3), (3 * BLOCK, BLOCK), wide(700, 699), (64, 1)]
)
def test_lists_of_several_blocks(device, length, keep, strategy):
    """Prevents seams between programs, and wrong hole counts when few or most tokens stay."""
    generator = torch.Generator().manual_seed(keep)
    lengths = [length, keep, keep + 1]
    slots = torch.randperm(3 * length, generator=generator).int().view(3, length)
    picks = [torch.randperm(n, generator=generator)[:keep].sort().values for n in lengths for _ in range(4)]
    # Only the first or only the last tokens: no hole is filled, or every one is.
    picks[0], picks[1] = torch.arange(keep), torch.arange(length - keep, length)
    kept = torch.stack(picks).view(3, 2, 2, keep)
    expected = list_moves(slots, kept, strategy)
    found = list_moves_triton(slots.to(device), kept.to(device), strategy)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("strategy", ["slide", "fill"])
@pytest.mark.parametrize(("keep", "recent", "cut"), [(BLOCK + 3, 7, BLOCK - 4), (BLOCK, 100, 300), wide(700, 690, 3)])
def test_cuts_of_several_blocks(device, keep, recent, cut, strategy):
    """Prevents seams between programs on both sides of a cut, and lengths read from another request."""
    generator = torch.Generator().manual_seed(keep)
    lengths = [keep + 1, keep + 2 * BLOCK, keep + 77]
    slots = torch.randperm(3 * max(lengths), generator=generator).int().view(3, -1)
    kept = []
    for length in lengths:
        older = torch.rand(2, 2, length - recent, generator=generator).argsort(-1)[..., : keep - recent]
        # One head keeps its oldest tokens.
        older[0, 0] = torch.arange(keep - recent)
        kept.append(torch.cat([older, torch.arange(length - recent, length).expand(2, 2, -1)], -1).sort(-1).values)
    kept, lengths = torch.stack(kept), torch.tensor(lengths)
    expected = list_moves(slots, kept, strategy, cut=cut, lengths=lengths)
    options = {"cut": cut, "lengths": lengths.to(device)}
    found = list_moves_triton(slots.to(device), kept.to(device), strategy, **options)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other.cpu())
