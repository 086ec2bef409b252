"""Copies between host and device by a fixed number of pinned blocks; a device is pretended."""

from __future__ import annotations

import pytest
import torch

from checkout import ROOT
from sglang_triattn.patches.model import pinned

CUDA = torch.device("cuda")


class Device:
    """Copies that wait until `run`, as on a GPU, and what the host does meanwhile.

    Attributes:
        pins: blocks of pinned memory so far.
        waits: how often the host waited.
        queued: copies that have not run.
    """

    def __init__(self) -> None:
        self.pins = self.waits = 0
        self.queued: list[Event] = []

    def pin(self, numbers: int) -> torch.Tensor:
        self.pins += 1
        return torch.full((numbers,), -1)

    def event(self) -> Event:
        return Event(self)

    def run(self, copies: int | None = None) -> None:
        """Runs the oldest copies that are queued, all by default."""
        for event in self.queued[:copies]:
            event.passed = True
        del self.queued[:copies]


class Event:
    def __init__(self, device: Device) -> None:
        self.passed, self._device = True, device

    def record(self) -> None:
        self.passed = False
        self._device.queued.append(self)

    def query(self) -> bool:
        return self.passed

    def synchronize(self) -> None:
        if not self.passed:
            self._device.waits += 1
            self._device.run(self._device.queued.index(self) + 1)


@pytest.fixture
def device(monkeypatch):
    """A pretended device, for up to 3 requests; tensors stay on the CPU."""
    made = Device()
    monkeypatch.setattr(pinned, "_pin", made.pin)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(pinned, "on_device", lambda place: True)
    monkeypatch.setattr(pinned, "uploads", pinned.Ring())
    monkeypatch.setattr(pinned, "reads", pinned.Ring())
    pinned.prepare(CUDA, 3)
    return made


def test_nothing_is_pinned_after_the_launch(device):
    """Prevents a stall of the device in each step with rounds, for as long as their requests have no further ones."""
    pins = device.pins
    assert pins == pinned.UPLOADS + pinned.READS
    kept = []
    for step in range(10 * pinned.UPLOADS):
        kept.append((pinned.read_later(torch.tensor([step, 2 * step])), [step, 2 * step]))
        pinned.to_device([step], torch.device("cpu"))
        device.run()
    for read, expected in kept:
        assert read() == expected
    assert device.pins == pins
    assert device.waits == 0


def test_a_block_waits_for_its_copy(device):
    """Prevents numbers of a later round in the place of those on their way, in either direction: without a free block,
    what is read stays on the device, and what is written is not pinned."""
    reads = [pinned.read_later(torch.tensor([number])) for number in range(pinned.READS + 3)]
    sent = [pinned.to_device([number], torch.device("cpu")) for number in range(pinned.UPLOADS + 3)]
    assert device.waits == 0
    assert [read() for read in reads] == [[number] for number in range(len(reads))]
    assert [each.tolist() for each in sent] == [[number] for number in range(len(sent))]
    assert device.pins == pinned.UPLOADS + pinned.READS


def test_numbers_are_saved_before_their_block_is_given_again(device):
    """Prevents a request that reads the position of another one's round, a round or two after its own."""
    first = pinned.read_later(torch.tensor([7, 8, 9]))
    device.run()
    for _ in range(pinned.READS + 1):
        pinned.read_later(torch.tensor([1]))
        device.run()
    assert first() == [7, 8, 9]
    assert device.waits == 0


def test_more_rounds_than_a_block_holds(device):
    """Prevents a step with more requests than the server was launched for from failing, or from losing some."""
    assert pinned.read_later(torch.arange(9))() == list(range(9))
    assert pinned.to_device([[1] * 9, [2] * 9], torch.device("cpu")).tolist() == [[1] * 9, [2] * 9]
    assert pinned.to_device([[1, 2], [3, 4]], torch.device("cpu")).tolist() == [[1, 2], [3, 4]]


def test_without_a_gpu(monkeypatch):
    """Prevents a server on CPUs from pinning memory, which torch refuses there."""
    monkeypatch.setattr(pinned, "_pin", lambda numbers: pytest.fail("pinned"))
    pinned.prepare("cpu", 8)
    assert pinned.to_device([[1], [2]], torch.device("cpu")).tolist() == [[1], [2]]
    assert pinned.read_later(torch.tensor([5, 6]))() == [5, 6]


@pytest.mark.parametrize(
    "folder", [*(f"patches/{room}" for room in ("model", "ranks", "request", "rounds", "scheduler")), "kernels"]
)
def test_nothing_else_pins(folder):
    """Prevents a copy of each step that does not use the rings."""
    files = [path for path in (ROOT / folder).rglob("*.py") if path.name != "pinned.py"]
    assert files
    assert [path for path in files if "pin_memory" in path.read_text(encoding="utf-8")] == []
