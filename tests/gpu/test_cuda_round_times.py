"""Times of rounds by CUDA's events."""

from __future__ import annotations

import pytest
import torch

from sglang_triattn.kernels.round_times import RING, RoundTimes, timing_events

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_times_come_without_waiting():
    """Prevents a host that waits for its rounds because they are timed, and times that are not the device's."""
    host, device = [], []
    times = RoundTimes(timing_events(torch.device("cuda")), host.append, device.append)
    stream, work = torch.cuda.Stream(), torch.randn(4096, 4096, device="cuda")
    work @ work
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with times.host(), torch.cuda.stream(stream), times.device():
            for _ in range(100):
                work @ work
        times.poll()
        early = list(device)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    times.poll()
    assert early == []
    assert len(host) == len(device) == 1
    assert host[0] < device[0]
    for _ in range(2 * RING):
        with times.host(), times.device():
            pass
        torch.cuda.synchronize()
        times.poll()
    assert len(device) == 1 + 2 * RING
