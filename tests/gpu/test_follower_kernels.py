"""What a draft model keeps, by the kernels and by their references."""

import pytest
import torch

from sglang_triattn.kernels.follower import Follower
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.pools import PADDING_SLOT
from test_compact_kernel import make_case


@pytest.mark.parametrize(
    ("strategy", "cut", "kind"),
    [
        ("fill", 20, "per-layer-head"),
        ("fill", 13, "per-head"),
        ("fill", 0, "shared"),
        ("slide", None, "per-layer-head"),
        ("slide", 13, "per-layer-head"),
        ("remap", None, "shared"),
    ],
)
@pytest.mark.parametrize("layers", [2, 1])
def test_equals_the_reference(device, strategy, cut, kind, layers):
    """Prevents a draft model's K/V from being read after it was overwritten, or by slots that are not adjacent."""
    lengths = torch.tensor([40, 34, 90], device=device)
    pools, slots, kept = make_case(device, lengths=lengths.tolist(), keep=33, sets=kind, recent=13)
    # Slot 0 is that of padding, and padding of rows is a slot.
    slots = torch.where(slots >= 1 << 40, slots[:, :1], slots).int() + 1
    draft = [*pools[:layers], *pools[2 : 2 + layers]]
    found = []
    for kernels in (True, False):
        own = [torch.cat([pool, pool[:2]]) for pool in draft]
        follower = Follower(Mover(own[:layers], own[layers:], kernels=kernels), layers, 2)
        follower.follow(slots, kept, strategy, cut=cut, lengths=lengths)
        found.append(own)
    for one, other, pool in zip(*found, draft, strict=True):
        assert torch.equal(one[PADDING_SLOT + 1 :].view(torch.uint8), other[PADDING_SLOT + 1 :].view(torch.uint8))
        assert not torch.equal(one[1 : len(pool)].view(torch.uint8), pool[1:].view(torch.uint8))
