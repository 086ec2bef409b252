"""Exceptions at every step of a round and of a conversation's row, and what must hold after each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from running import Running
from sglang_triattn.kernels import device_round, mover, scorer
from sglang_triattn.patches.rounds import compressor, launches, memory_pressure
from sglang_triattn.patches.rounds.compressor import Compressor
from sglang_triattn.patches.rounds.launches import Launch
from sglang_triattn.patches.rounds.recovery import Attempt
from sglang_triattn.patches.scheduler import conversations, idle_rows
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.request.lifecycle import CompressedRequest
from simulation import Simulation

ROUND_STEPS = {
    "plan": (compressor, "plan_round"),
    "early rounds": (compressor, "early_rounds"),
    "early plan": (memory_pressure, "plan_eviction"),
    "shape": (compressor, "shape_for"),
    "snapshot": (compressor, "snapshot"),
    "counts": (launches, "to_device"),
    "shortened": (compressor, "shortened"),
    "windows": (compressor, "free_peers"),
    "score": (scorer, "score_torch"),
    "select": (scorer, "select_torch"),
    "first hole": (device_round, "unchanged_start"),
    "permute": (device_round, "remap"),
    "list moves": (mover, "list_moves"),
    "move": (mover, "move_torch"),
    "positions": (compressor, "read_later"),
    "close up": (Launch, "close_up"),
    "emptied": (Launch, "emptied"),
    "free": (Compressor, "_give_back"),
    "settle": (Attempt, "settle"),
    "record": (Compressor, "_record"),
    "lifecycle": (CompressedRequest, "round"),
}
"""Each step of a round: the owner and name of its function."""

TALK_STEPS = {
    "may it continue": (conversations, "resumable_length"),
    "acquire": (CompressedRequest, "acquire"),
    "take the row": (conversations, "take_row"),
    "leave the tail": (conversations, "free_tail"),
    "cut the row": (idle_rows, "free_tail"),
    "park": (Conversations, "_park"),
}
"""The same for what conversations do with rows."""


class Injected(Exception):
    """Planted by a test."""


class Fault:
    """Raises once, at the `call`-th call of a step.

    Args:
        late: whether it raises after the step has done its work.
    """

    def __init__(self, steps: dict[str, tuple], step: str, call: int, late: bool) -> None:
        self._owner, self._name = steps[step]
        self._call, self._late = call, late
        self.raised = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        real, calls = getattr(self._owner, self._name), 0

        def failing(*args, **kwargs):
            nonlocal calls
            calls += 1
            now = calls == self._call
            if now and not self._late:
                self.raised = True
                raise Injected("planted")
            result = real(*args, **kwargs)
            if now:
                self.raised = True
                raise Injected("planted")
            return result

        setattr(self._owner, self._name, failing)
        try:
            yield
        finally:
            setattr(self._owner, self._name, real)


def step_with(sim: Simulation, fault: Fault, chunked: Running | None = None) -> list[Running]:
    """Runs the rounds of a step under a fault; returns the running requests that end with an error.

    Every other request either had its whole round or is as before, which the caller's checks of rows show.
    """
    requests = [*sim.running, *([] if chunked is None else [chunked])]
    before = {running: (running.positions.shape[-1], running.evicted) for running in requests}
    with fault.planted():
        batch = sim.compress(chunked)
    for index, running in enumerate(sim.running):
        length = running.req.kv.kv_committed_len
        assert int(batch.seq_lens_cpu[index]) == int(batch.seq_lens[index]) == length, "the batch has other lengths"
        assert batch.orig_seq_lens[index] - length == running.evicted, "positions would be wrong"
    for running in requests:
        length, evicted = before[running]
        if failed(running):
            running.barred = True
            assert fault.raised, "a request ended for nothing"
        elif running.evicted != evicted:
            running.positions = sim.content(sim.row(running))[:, :, 0, :, 1].permute(1, 2, 0).long()
            if running.first_tainted is None:
                running.first_tainted = length
    return [running for running in sim.running if failed(running)]


def failed(running: Running) -> bool:
    """Whether the request ends with an error."""
    return running.req.to_finish is not None or running.req.discard_output_reason is not None
