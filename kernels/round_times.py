"""How long the rounds of a step take, on the host and on the device; the host never waits to know it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

RING = 8
"""Steps whose device times may be outstanding. A step after them, before the oldest has ended, is not timed."""

Observe = Callable[[float], None]


class Untimed:
    """Times nothing."""

    def host(self) -> AbstractContextManager:
        """Context for all that the host does for the rounds of a step."""
        return nullcontext()

    def device(self) -> AbstractContextManager:
        """Context, within that of `host`, for what the device does for them; entered on the stream that it runs on."""
        return nullcontext()


class RoundTimes(Untimed):
    """Reports the times of each step with rounds, in seconds, to two observers.

    Where the device works on its own, the host's time is that of the host's thread, and the device's is what passes on
    its stream between the first and the last work of the launches, known at some later call of `poll`. A CPU does both
    one after the other: the launches' time is the device's, the rest of the step's the host's.

    A step that raises is not observed.

    Args:
        event: makes an event that times, such as `torch.cuda.Event(enable_timing=True)`; None if the host itself does
            the device's work.
        on_host, on_device: called with the seconds of a step.
    """

    def __init__(self, event: Callable[[], torch.cuda.Event] | None, on_host: Observe, on_device: Observe) -> None:
        self._on_host, self._on_device = on_host, on_device
        # Made once: an event is a resource of the driver.
        self._ring = None if event is None else [(event(), event()) for _ in range(RING)]
        self._next = 0
        self._outstanding: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._worked = 0.0

    @property
    def outstanding(self) -> bool:
        """Whether `poll` has something to look for."""
        return bool(self._outstanding)

    @contextmanager
    def host(self) -> Iterator[None]:
        self._worked, start = 0.0, time.perf_counter()
        yield
        self._on_host(time.perf_counter() - start - self._worked)

    @contextmanager
    def device(self) -> Iterator[None]:
        if self._ring is None:
            start = time.perf_counter()
            yield
            self._worked = time.perf_counter() - start
            self._on_device(self._worked)
        elif len(self._outstanding) == len(self._ring):
            yield
        else:
            first, last = pair = self._ring[self._next]
            first.record()
            yield
            last.record()
            self._next = (self._next + 1) % len(self._ring)
            self._outstanding.append(pair)

    def poll(self) -> None:
        """Observes the device times of the steps that have ended; waits for none."""
        while self._outstanding and self._outstanding[0][1].query():
            first, last = self._outstanding.popleft()
            self._on_device(first.elapsed_time(last) / 1e3)


def timing_events(device: torch.device) -> Callable[[], torch.cuda.Event] | None:
    """What makes the events of `RoundTimes` for `device`; None for a CPU."""
    return (lambda: torch.cuda.Event(enable_timing=True)) if device.type == "cuda" else None
