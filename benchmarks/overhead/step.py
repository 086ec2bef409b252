"""What does --enable-triattention add to a decode step in which nothing is due?

The scheduler's side, without a model: every hook of a decode step, wrapped as SGLang wraps it, around functions that do
nothing, with SGLang's own requests on its tree and allocator. All requests stream, so each step also asks for their
reports. Blocks of steps with and without the hooks alternate. `microseconds` is the median difference of neighbouring
blocks, per step; `share` divides it by the least time of a decode step on an H100, as metrics.py does. Positions
take two additions of [requests], which are computed on this machine's CPU here. No figure is reported unless the hooks
find a round once one is due.

    python -m benchmarks.overhead.step --json benchmarks/results/step_cost.json
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import report
from benchmarks.overhead.census import FROZEN, publish_settings, scheduler_with
from benchmarks.overhead.metrics import REQUESTS, cost_row, read_arguments

ROW_LENGTH = 256
STEP = "Scheduler.get_next_batch_to_run", "ForwardBatch.init_new", "ModelRunner.sample"
"""What SGLang calls in each decode step of a model without window layers, and compression hooks."""

Step = Callable[[], None]


class Hooked:
    """The hooks of a decode step around functions that do nothing.

    Attributes:
        plain: a step without them.
        step: a step with them.
    """

    def __init__(self, requests: int) -> None:
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

        from sglang_triattn.config import Config
        from sglang_triattn.patches.compression import Compression
        from sglang_triattn.patches.observability.reporting import reporting_streamer
        from sglang_triattn.patches.request.compressed import attach_options
        from sglang_triattn.patches.rounds.compressor import Compressor
        from sglang_triattn.request.options import CompressionOptions
        from sglang_triattn.rounds.rules import complete

        self._scheduler = scheduler = scheduler_with(requests, ROW_LENGTH, 2 * requests * ROW_LENGTH, 1, "cpu")
        group = SimpleNamespace(world_size=1)
        scheduler.tp_group = scheduler.dp_tp_group = group
        self._config = complete(Config())
        for request in scheduler.running_batch.reqs:
            attach_options(request, CompressionOptions(self._config)).admit(FROZEN, None)
        compression = Compression(self._config)
        compression._scheduler = scheduler
        compression._conversations.attach(scheduler)
        # Rounds that are not due neither score nor move.
        unused: Any = None
        self._compressor = Compressor(scheduler, self._config, unused, unused, compression._conversations)
        compression.compressor = self._compressor
        batch = scheduler.running_batch
        mode = SimpleNamespace(is_decode=lambda: True, is_extend=lambda: False, is_mixed=lambda: False)
        self._forward = SimpleNamespace(forward_mode=mode, positions=batch.seq_lens - 1)
        batch.forward_mode = mode
        functions = [lambda *_: None, lambda *_: self._forward, lambda *_: None]
        self.plain = self._step(functions, lambda _: {})
        by_name = {".".join(hook.target.rsplit(".", 2)[1:]): hook for hook in compression.hooks()}
        wrapped = [
            _wrap_fn(function, by_name[name].function, HookType(by_name[name].kind))
            for name, function in zip(STEP, functions, strict=True)
        ]
        streamer = object.__new__(reporting_streamer(SchedulerOutputStreamer, lambda: None))
        self.step = self._step(wrapped, streamer.build_additional_customized_info)

    def _step(self, functions: list[Callable], reports: Callable) -> Step:
        schedule, init_new, sample = functions
        scheduler, batch = self._scheduler, self._scheduler.running_batch

        def step() -> None:
            schedule(scheduler, batch, batch)
            sample(None, None, init_new(None, batch))
            reports(batch.reqs)

        return step

    def finds_rounds(self) -> bool:
        """Whether a request that outgrows its budget has a round planned."""
        kv = self._scheduler.running_batch.reqs[0].kv
        # A request that grows by more than a token is one that has just joined.
        self._compressor._looks.forget()
        kv.kv_committed_len = kv.kv_allocated_len = FROZEN + self._config.budget + self._config.interval
        return len(self._compressor._plan(self._scheduler.running_batch.reqs)) == 1


def block(step: Step, steps: int) -> float:
    """Seconds of so many steps."""
    start = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - start


def measure(requests: int, blocks: int, steps: int) -> dict:
    """The cost for this many running requests.

    Raises:
        SystemExit: the hooks do not see a request that is due.
    """
    hooked = Hooked(requests)
    differences = [(block(hooked.step, steps) - block(hooked.plain, steps)) / steps for _ in range(blocks)]
    if not hooked.finds_rounds():
        raise SystemExit("the hooks plan no round for a request that is due")
    return cost_row(requests, statistics.median(differences))


def rows(blocks: int, steps: int) -> Iterator[dict]:
    for requests in REQUESTS:
        yield measure(requests, blocks, steps)


def main(argv: list[str] | None = None) -> None:
    arguments = read_arguments("What compression adds to a decode step in which nothing is due.", argv)
    publish_settings()
    blocks, steps = (5, 100) if arguments.quick else (arguments.blocks, 2000)
    with torch.inference_mode():
        report(list(rows(blocks, steps)), arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
