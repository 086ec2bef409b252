"""The `move` kernel against its twin, byte for byte."""

import pytest
import torch

from sglang_triattn.kernels.compact import list_moves, move_naive
from sglang_triattn.kernels.compact_triton import move_triton
from sglang_triattn.kernels.key_pools import key_pools

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def make_case(device, *, lengths, keep, sets, layers=2, heads=2, head_dim=64, dtype=torch.bfloat16, spread=1, seed=0):
    """Pools of random bytes, slots of the requests (`spread` apart) and kept sets."""
    generator = torch.Generator().manual_seed(seed)
    count, width = sum(lengths) * spread + 3, torch.empty(0, dtype=dtype).element_size()
    shape = (2 * layers, count, heads, head_dim * width)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    order = torch.randperm(sum(lengths), generator=generator) * spread
    slots, kept = torch.full((len(lengths), max(lengths)), 1 << 40), []
    for row, length in zip(slots, lengths, strict=True):
        row[:length], order = order[:length], order[length:]
        picks = [torch.randperm(length, generator=generator)[:keep].sort().values for _ in range(layers * heads)]
        kept.append(torch.stack(picks).view(layers, heads, keep))
    kept = torch.stack(kept)
    kept = {"shared": kept[:, 0, 0], "per-head": kept[:, 0], "per-layer-head": kept}[sets]
    return [pool.to(device).view(dtype) for pool in raw], slots.to(device), kept.contiguous().to(device)


def check(pools, slots, kept, strategy):
    sources, targets = list_moves(slots, kept, strategy)
    expected, found = [pool.clone() for pool in pools], [pool.clone() for pool in pools]
    half = len(pools) // 2
    move_naive(expected[:half], sources, targets)
    move_naive(expected[half:], sources, targets)
    move_triton(key_pools(found), sources, targets, layers=half, ordered=strategy == "slide")
    assert any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, pools, strict=True))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("strategy", ["slide", "fill"])
@pytest.mark.parametrize("sets", ["shared", "per-head", "per-layer-head"])
def test_moves_equal_the_twin(device, sets, strategy):
    """Prevents rows of another head, layer or request, and rows overwritten before they are read."""
    check(*make_case(device, lengths=[40, 33, 90], keep=33, sets=sets), strategy)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_dtype_and_width(device, dtype, head_dim):
    """Prevents a head's last words from being lost where its size is no power of two."""
    check(*make_case(device, lengths=[20, 11], keep=9, sets="per-head", head_dim=head_dim, dtype=dtype), "slide")


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
    sources, targets = list_moves(slots, kept, "fill")
    move_triton(key_pools(pools), sources, targets, layers=2, ordered=False)
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(pools, before, strict=True))


def test_odd_heads_are_refused(device):
    """Prevents words that reach into the next head."""
    pools = [torch.zeros(8, 2, 7, dtype=torch.float8_e5m2, device=device) for _ in range(2)]
    slots = torch.arange(8, device=device)[None]
    sources, targets = list_moves(slots, torch.tensor([[1, 2]], device=device), "slide")
    with pytest.raises(ValueError, match="no multiple of 16 bytes"):
        move_triton(key_pools(pools), sources, targets, layers=1, ordered=True)
