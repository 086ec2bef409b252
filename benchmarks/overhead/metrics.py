"""What do the metrics of compression add to a decode step?

The scheduler's side of --enable-metrics, without a model: SGLang's own requests on its tree and allocator, and
prometheus_client writing to the files that SGLang's processes share. Each request has a round every `INTERVAL` steps,
spread evenly, so that a large batch has some in every step; gauges are set every `LOG_INTERVAL` steps, as SGLang does.
Blocks of steps with and without metrics alternate. `microseconds` is the median difference of neighbouring blocks, per
step; `share` divides it by the least time that a decode step of Llama-3-8B in bf16 can take on an H100: to read the
weights and, at the default budget, each request's K/V once at 3.35 TB/s. What the rounds themselves and SGLang's own
metrics cost is in neither block, nor are the events of a GPU (two records and a query per step with rounds). No figure
is reported unless the metrics counted every round.

    python -m benchmarks.overhead.metrics --json benchmarks/results/metrics_cost.json
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from types import SimpleNamespace

import torch

from benchmarks.common import report
from benchmarks.overhead.census import publish_settings, scheduler_with

REQUESTS = (1, 32, 128)
ROW_LENGTH = 256
INTERVAL, LOG_INTERVAL = 128, 40
# Bytes of the weights and of a request's K/V (32 layers, 8 KV heads, head_dim 128), and bytes per second.
WEIGHTS, HELD, BANDWIDTH = 16e9, 2176 * 32 * 8 * 128 * 2 * 2, 3.35e12


def metered(scheduler: SimpleNamespace):
    """(compressor, metrics) for this scheduler, as far as metrics read of a compressor."""
    from sglang_triattn.patches.observability.metrics import RoundMetrics
    from sglang_triattn.rounds.plan import Totals

    labels = {"model_name": "m", "engine_type": "unified", "tp_rank": 0, "pp_rank": 0, "moe_ep_rank": 0}
    collector = SimpleNamespace(labels=labels, _counter_cls=None, _gauge_cls=None, _histogram_cls=None)
    compressor = SimpleNamespace(totals=Totals(), device=torch.device("cpu"), times=None)
    conversations = SimpleNamespace(parked=0, resumed=0)
    return compressor, RoundMetrics(collector, scheduler, compressor, conversations)


def block(compressor: SimpleNamespace, metrics, requests: int, first: int, steps: int) -> float:
    """Seconds of `steps` steps from step `first` on; `metrics` None runs them without."""
    from sglang_triattn.rounds.plan import Plan

    plan = Plan(frozen=128, old_length=2304, new_length=2176, next_position=4096, freed_slots=128)
    start = time.perf_counter()
    for step in range(first, first + steps):
        due = requests * (step + 1) // INTERVAL - requests * step // INTERVAL
        if due:
            with compressor.times.host(), compressor.times.device():
                pass
            for _ in range(due):
                compressor.totals.add(plan, 1 << 20)
        if metrics is not None:
            metrics.after_step()
            if step % LOG_INTERVAL == 0:
                metrics.publish()
    return time.perf_counter() - start


def measure(requests: int, blocks: int, steps: int) -> dict:
    """The cost for this many running requests.

    Raises:
        SystemExit: the metrics missed a round.
    """
    from prometheus_client import REGISTRY

    from sglang_triattn.kernels.round_times import Untimed
    from sglang_triattn.rounds.plan import Totals

    scheduler = scheduler_with(requests, ROW_LENGTH, 2 * requests * ROW_LENGTH, 1, "cpu")
    before = set(REGISTRY._collector_to_names)
    compressor, metrics = metered(scheduler)
    rounds = metrics._counters["rounds_total"]._value
    # The file may know of an earlier case with the same labels.
    known = rounds.get()
    plain = SimpleNamespace(totals=Totals(), times=Untimed())
    differences = []
    for number in range(blocks):
        without = block(plain, None, requests, number * steps, steps)
        differences.append((block(compressor, metrics, requests, number * steps, steps) - without) / steps)
    counted = rounds.get() - known
    # Names are registered once in a process.
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)
    if not counted == compressor.totals.rounds == plain.totals.rounds:
        raise SystemExit(f"the metrics counted {counted} of {plain.totals.rounds} rounds")
    return cost_row(requests, statistics.median(differences))


def cost_row(requests: int, seconds: float) -> dict:
    """The row of a report: so many seconds more per step, alone and as a share of the step."""
    return {
        "shape": f"{requests} requests",
        "requests": requests,
        "microseconds": 1e6 * seconds,
        "share": seconds / ((WEIGHTS + requests * HELD) / BANDWIDTH),
    }


def rows(blocks: int, steps: int) -> Iterator[dict]:
    for requests in REQUESTS:
        yield measure(requests, blocks, steps)


def read_arguments(description: str, argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a benchmark that runs blocks of steps in pairs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--blocks", type=int, default=41, help="pairs of blocks (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="5 pairs of short blocks")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    arguments = read_arguments("What metrics of compression add to a decode step.", argv)
    publish_settings()
    with tempfile.TemporaryDirectory() as folder:
        # Read when prometheus_client is imported.
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
        blocks, steps = (5, 2 * INTERVAL) if arguments.quick else (arguments.blocks, 20 * INTERVAL)
        report(list(rows(blocks, steps)), arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
