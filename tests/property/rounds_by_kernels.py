"""Rounds of the real compressor with the Triton kernels instead of their twins.

Not collected by itself: tests/unit/test_interpreted.py runs it in a process with Triton's interpreter.
"""

import pytest
import torch

from checks import check_books, check_row, decode_together
from simulation import Simulation


def history(**options) -> list[torch.Tensor]:
    """Positions that three requests of unequal length hold in the end, after a few rounds each."""
    sim = Simulation(**options)
    requests = [sim.request([5] * 8 + [tail] * (1 + tail)) for tail in range(3)]
    for request in requests:
        assert sim.admit(request, 1000)
    decode_together(sim, requests, 45)
    assert sim.rounds >= 9
    check_books(sim)
    for request in requests:
        check_row(sim, request)
    return [request.positions for request in requests]


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "shared-mean"},
        {"selection": "union", "budget_scope": "total"},
        {"selection": "per-head"},
        {"selection": "per-layer-head", "recent": 10},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_kernels_keep_what_their_twins_keep(page_size, settings):
    """Prevents arguments that reach a kernel in another dtype, order or unit than its twin understands."""
    with_kernels, without = (history(page_size=page_size, kernels=kernels, **settings) for kernels in (True, False))
    for one, other in zip(with_kernels, without, strict=True):
        assert torch.equal(one, other)
