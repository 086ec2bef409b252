"""Copies between a KV pool and the host tier on plain CPUs, in both host memory layouts."""

import pytest
import torch

from sglang_triattn.patches.cpu import host_tier

LAYERS, SLOTS, HEADS, WIDTH = 3, 48, 2, 4


def slots_of(pages: list[int], page_size: int) -> torch.Tensor:
    return torch.cat([torch.arange(page * page_size, (page + 1) * page_size) for page in pages])


def random_pool() -> list[torch.Tensor]:
    """K of all layers, then V of all layers."""
    return [torch.randn(SLOTS, HEADS, WIDTH) for _ in range(2 * LAYERS)]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_what_was_saved_is_loaded(layout, page_size):
    """Prevents a prompt's K/V from coming back to another slot, page or layer, or V as K."""
    torch.manual_seed(page_size)
    pool = random_pool()
    kept = [buffer.clone() for buffer in pool]
    left, host, back = (slots_of(pages, page_size) for pages in ([2, 7, 5], [4, 0, 9], [1, 10, 3]))

    if layout == "layer_first":
        tier = [torch.zeros(SLOTS, HEADS, WIDTH) for _ in pool]
        host_tier.copy_layers(pool, tier, left, host, page_size)
    else:
        tier = [torch.zeros(SLOTS // page_size, LAYERS, page_size, HEADS, WIDTH) for _ in range(2)]
        host_tier.save_layers(pool, tier, left, host, page_size)
    for buffer in pool:
        buffer[left] = 0
    for layer in range(LAYERS):
        pair = [pool[layer], pool[LAYERS + layer]]
        if layout == "layer_first":
            host_tier.copy_layers([tier[layer], tier[LAYERS + layer]], pair, host, back, page_size)
        else:
            host_tier.load_layer(tier, pair, host, back, layer, page_size)

    untouched = torch.ones(SLOTS, dtype=torch.bool)
    untouched[torch.cat([left, back])] = False
    for buffer, before in zip(pool, kept, strict=True):
        assert torch.equal(buffer[back], before[left])
        assert torch.equal(buffer[untouched], before[untouched])
