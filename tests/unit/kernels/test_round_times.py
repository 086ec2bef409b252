"""Times of rounds, with events whose end the test decides; tests/gpu/test_cuda_round_times.py has CUDA's."""

from __future__ import annotations

import itertools

import pytest

from sglang_triattn.kernels.round_times import RING, RoundTimes


class Event:
    """What `RoundTimes` uses of a CUDA event; its time is the number of records before it, in milliseconds."""

    made = 0
    clock = itertools.count()
    ended = False

    def __init__(self) -> None:
        Event.made += 1

    def record(self) -> None:
        self.at = next(Event.clock)

    def query(self) -> bool:
        return Event.ended

    def elapsed_time(self, end: Event) -> float:
        assert Event.ended, "waits for the device"
        return end.at - self.at


@pytest.fixture
def timed():
    Event.made, Event.clock, Event.ended = 0, itertools.count(), False
    host, device = [], []
    return RoundTimes(Event, host.append, device.append), host, device


def step(times: RoundTimes) -> None:
    with times.host(), times.device():
        pass


def test_nothing_is_read_before_it_has_ended(timed):
    """Prevents a scheduler that waits for the device to learn how long a round took."""
    times, host, device = timed
    step(times)
    assert times.outstanding
    times.poll()
    assert (len(host), device) == (1, [])
    Event.ended = True
    times.poll()
    assert device == [0.001]
    assert not times.outstanding


def test_events_are_reused(timed):
    """Prevents events that pile up on a slow device, and times of the wrong step."""
    times, host, device = timed
    for _ in range(RING + 3):
        step(times)
    assert Event.made == 2 * RING
    Event.ended = True
    times.poll()
    assert (len(host), device) == (RING + 3, [0.001] * RING)
    for _ in range(2 * RING):
        step(times)
        times.poll()
    assert Event.made == 2 * RING
    assert len(device) == 3 * RING


def test_a_step_that_fails_is_not_observed(timed):
    """Prevents times of rounds that did not happen, and a ring that loses its events to them."""
    times, host, device = timed
    for _ in range(2 * RING):
        with pytest.raises(ZeroDivisionError), times.host(), times.device():
            raise ZeroDivisionError
    assert not times.outstanding
    step(times)
    Event.ended = True
    times.poll()
    assert (len(host), len(device)) == (1, 1)


def test_a_cpu_does_both_in_turn():
    """Prevents counting the launches of a CPU twice."""
    host, device = [], []
    times = RoundTimes(None, host.append, device.append)
    with times.host(), times.device():
        for _ in range(100_000):
            pass
    assert host[0] < device[0]
    with times.host():
        pass
    assert host[1] >= 0
    assert len(device) == 1
    assert not times.outstanding
