"""Small copies between the host and the device, by pinned memory that a launch allocates once.

Pinning a block takes tens of microseconds or more and orders against work on the device, and torch's own cache of such
blocks grows for as long as more of them are in use than ever before. So rounds take theirs from rings of a fixed size.
Where a ring has none to give, they go without: nothing here waits for a copy in order to begin another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import torch

# A step with rounds makes up to ten copies to the device, and one to the host; up to three steps are in flight.
UPLOADS, READS = 32, 8


class Event(Protocol):
    """What is used of torch.cuda.Event."""

    def record(self) -> None: ...
    def query(self) -> bool: ...
    def synchronize(self) -> None: ...


class Block:
    """One pinned block.

    Attributes:
        numbers: [n] int64 in pinned memory.
        event: recorded after the last copy to or from it.
        read: reads the numbers that were last copied to it; None if there are none to read.
    """

    def __init__(self, numbers: torch.Tensor, event: Event) -> None:
        self.numbers, self.event = numbers, event
        self.read: Read | None = None


class Read:
    """Numbers on their way to the host. Calling it gives them, and waits for their copy."""

    def __init__(self, block: Block, count: int) -> None:
        self._block, self._count = block, count
        self._values: list[int] | None = None

    def __call__(self) -> list[int]:
        if self._values is None:
            self._block.event.synchronize()
            self.save()
        assert self._values is not None
        return self._values

    def save(self) -> None:
        """Takes the numbers out of the block, whose copy has passed, so that another may use it."""
        self._values = self._block.numbers[: self._count].tolist()
        self._block.read = None


class Ring:
    """Blocks that are given in turn; none before `allocate`."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()

    def allocate(self, blocks: int, numbers: int) -> None:
        """Makes `blocks` of `numbers` each, in the place of those it had."""
        self._blocks = deque(Block(_pin(numbers), torch.cuda.Event()) for _ in range(blocks))

    def take(self, count: int) -> Block | None:
        """The block that was given longest ago; None if it is too small, or its last copy has not passed."""
        if not self._blocks:
            return None
        block = self._blocks[0]
        if count > len(block.numbers) or not block.event.query():
            return None
        if block.read is not None:
            block.read.save()
        self._blocks.rotate(-1)
        return block


uploads, reads = Ring(), Ring()


def prepare(device: torch.device | str, requests: int) -> None:
    """Allocates the rings of this process for rounds of up to `requests` requests in a step; only for CUDA."""
    if torch.device(device).type == "cuda":
        # Four numbers describe a round.
        uploads.allocate(UPLOADS, 4 * requests)
        reads.allocate(READS, requests)


def _pin(numbers: int) -> torch.Tensor:
    return torch.empty(numbers, dtype=torch.int64, pin_memory=True)


def on_device(place: torch.Tensor | torch.device) -> bool:
    """Whether copies from and to there pass through pinned memory."""
    return (place.device if isinstance(place, torch.Tensor) else place).type == "cuda"


def to_device(values: list, device: torch.device) -> torch.Tensor:
    """`values` as int64 on the device; the host does not wait."""
    host = torch.tensor(values, dtype=torch.int64)
    if not on_device(device):
        return host.to(device)
    block = uploads.take(host.numel())
    if block is None:
        # CUDA puts what is not pinned aside before it returns.
        return host.to(device, non_blocking=True)
    staged = block.numbers[: host.numel()].view(host.shape).copy_(host)
    copied = staged.to(device, non_blocking=True)
    block.event.record()
    return copied


def read_later(values: torch.Tensor) -> Callable[[], list[int]]:
    """Starts a copy of a small device tensor to the host; calling the result waits for the copy, done by then.

    Args:
        values: [n] int64.
    """
    if not on_device(values):
        return values.tolist
    block = reads.take(len(values))
    if block is None:
        return _LateRead(values)
    block.numbers[: len(values)].copy_(values, non_blocking=True)
    block.event.record()
    block.read = Read(block, len(values))
    return block.read


class _LateRead:
    """Numbers that stay on the device until they are read."""

    def __init__(self, values: torch.Tensor) -> None:
        self._values: torch.Tensor | list[int] = values
        self._made = torch.cuda.Event()
        self._made.record()

    def __call__(self) -> list[int]:
        if isinstance(self._values, torch.Tensor):
            self._made.synchronize()
            self._values = self._values.tolist()
        return self._values
