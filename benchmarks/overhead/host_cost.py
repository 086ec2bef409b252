"""What does compression cost the scheduler's host in a step, by the number of running requests?

Without a model or a GPU: SGLang's own requests on its tree, rows and allocator, every hook of a decode step around
functions that do nothing, and rounds whose Triton kernels are compiled for sm_90 and launched into a driver that does
nothing; CUDA's own launch function, about 3 microseconds a launch on a usual machine, is not in it. Requests share
launches as those of Qwen3-8B do at the default budget. Times are of the thread's CPU.

- `idle`: no round is due. `drafts`: the same with drafted tokens, of rows that have been shortened.
- `spread`: rounds are due one after another, evenly over an interval of 128 steps.
- `burst`: all requests have come together, so all rounds are due at one step unless they are levelled.
- `admission`: one PrefillAdder that finds no room for one waiting request; `plain_microseconds` is SGLang's own.

`rounds_per_step` is the flag: 0 leaves rounds where they are due, "auto" levels them. `microseconds` is the median of
the most expensive kind of step, one with `rounds` rounds; `mean_microseconds` the mean of all steps. `launches` counts
kernels and, of torch's operations, those that make or write a tensor, of which some are the host's own.

No figure is reported unless the launches, run by Triton's interpreter with the arguments that the driver was given,
leave the same K/V in the same rows as the references do, and admission reserves what the formula says.

    python -m benchmarks.overhead.host_cost --json benchmarks/results/host_cost.json
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.common import report
from benchmarks.overhead.census import FROZEN, publish_settings
from benchmarks.overhead.null_driver import LAUNCHES, Skipped, interpreting, null_driver
from benchmarks.overhead.running_server import INTERVAL, MAX_NEW_TOKENS, RunningServer

RUNNING, QUICK_RUNNING = (16, 64, 256, 1024), (16, 256)


class CountedOperations(TorchDispatchMode):
    """Counts operations of torch that make new memory or write to some: on a GPU, most are a launch or a copy.

    Attributes:
        count: so many.
    """

    HOST = ("lift_fresh", "detach_", "unbind", "is_pinned", "pin_memory")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        given = {each.untyped_storage().data_ptr() for each in tree_leaves((args, kwargs)) if _is_tensor(each)}
        made = [each for each in tree_leaves(result) if _is_tensor(each)]
        writes = name.endswith("_") or any(each.untyped_storage().data_ptr() not in given for each in made)
        self.count += name not in self.HOST and "empty" not in name and writes
        return result


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@contextmanager
def no_collection() -> Iterator[None]:
    """Context without Python's garbage collector, whose time is not the step's."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(function: Callable[[], None]) -> float:
    """Microseconds of thread CPU time, without what stands in for a GPU's results."""
    skipped, start = Skipped.nanoseconds, time.thread_time_ns()
    function()
    return (time.thread_time_ns() - start - (Skipped.nanoseconds - skipped)) / 1e3


def kinds_of_steps(server: RunningServer, steps: int, step: Callable[[], None] | None = None) -> dict[int, list[float]]:
    """Microseconds of each step, by how many rounds it had."""
    found = defaultdict(list)
    with no_collection():
        for _ in range(steps):
            server.decode()
            before = server.rounds
            spent = timed(step or server.step)
            found[server.rounds - before].append(spent)
    return found


def launches_in(server: RunningServer, rounds: int, step: Callable[[], None] | None = None) -> int:
    """Launches of the next step that has so many rounds."""
    for _ in range(2 * INTERVAL):
        server.decode()
        before, launched = server.rounds, LAUNCHES.total()
        with CountedOperations() as operations:
            (step or server.step)()
        if server.rounds - before == rounds:
            return operations.count + LAUNCHES.total() - launched
    raise SystemExit(f"no step has {rounds} rounds a second time")


def row_of(
    server: RunningServer,
    which: str,
    kinds: dict[int, list[float]],
    step: Callable[[], None] | None = None,
) -> dict:
    """A row of the report, of the most expensive kind of step."""
    medians = {rounds: statistics.median(spent) for rounds, spent in kinds.items()}
    worst = max(medians, key=medians.__getitem__)
    all_steps = [spent for each in kinds.values() for spent in each]
    return {
        "shape": f"{len(server.requests)} {which}",
        "running": len(server.requests),
        "mode": which,
        "rounds_per_step": server.config.rounds_per_step,
        "rounds": worst,
        "microseconds": medians[worst],
        "mean_microseconds": statistics.fmean(all_steps),
        "plain_microseconds": None,
        "launches": launches_in(server, worst, step),
    }


def measure(running: int, cycles: int) -> Iterator[dict]:
    """The rows of so many running requests, over so many intervals each."""
    steps = cycles * INTERVAL
    for rounds_per_step in (0, "auto"):
        server = RunningServer(running, rounds_per_step=rounds_per_step)
        kinds = kinds_of_steps(server, steps)
        if server.rounds < running * (cycles - 1):
            raise SystemExit(f"{running} requests had {server.rounds} rounds in {cycles} intervals")
        if rounds_per_step == 0:
            yield row_of(server, "idle", {0: kinds[0]})
            drafted = kinds_of_steps(server, INTERVAL // 2, server.drafted)
            yield row_of(server, "drafts", {0: drafted[0]}, server.drafted)
            del kinds[0]
        yield row_of(server, "burst", kinds)
        server = RunningServer(running, rounds_per_step=rounds_per_step, spread=True)
        kinds_of_steps(server, INTERVAL)
        yield row_of(server, "spread", kinds_of_steps(server, steps))
    yield admission(server, cycles)


def admission(server: RunningServer, cycles: int) -> dict:
    """The row of admission.

    Raises:
        SystemExit: something else is reserved for the running requests than the formula says.
    """
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder
    from sglang.srt.sampling.sampling_params import SamplingParams

    from sglang_triattn.patches.request.compressed import attach_options
    from sglang_triattn.patches.scheduler.bounded_adder import bounded_adder
    from sglang_triattn.request.options import CompressionOptions

    scheduler = server.scheduler
    waiting = Req("waiting", "", array("q", [1]), SamplingParams(max_new_tokens=MAX_NEW_TOKENS))
    attach_options(waiting, CompressionOptions(server.config))
    waiting.init_next_round_input(scheduler.tree_cache)
    # Longer than the pool.
    waiting.full_untruncated_fill_ids = array("q", bytes(8 * scheduler.max_total_num_tokens))
    bounded = bounded_adder(PrefillAdder, server.compression._conversations)

    def adder_of(cls: type[PrefillAdder]) -> PrefillAdder:
        pools = scheduler.tree_cache, scheduler.token_to_kv_pool_allocator
        return cls(1, *pools, server.batch, 0.7, 1 << 30, None, waiting_queue_len=1)

    def offer(cls: type[PrefillAdder]) -> None:
        adder_of(cls).add_one_req(waiting, has_chunked_req=False, truncation_align_size=None)

    reserved, expected = adder_of(bounded).memory_budget.total_offset, reserved_by_formula(server)
    if reserved != expected:
        raise SystemExit(f"admission reserves {reserved} slots instead of {expected}")
    repeats = max(3, 2000 // len(server.requests))
    ours, plain = [], []
    with no_collection():
        for _ in range(5 * cycles):
            ours.append(timed(lambda: [offer(bounded) for _ in range(repeats)]) / repeats)
            plain.append(timed(lambda: [offer(PrefillAdder) for _ in range(repeats)]) / repeats)
    with CountedOperations() as operations:
        offer(bounded)
    row = row_of(server, "admission", {0: ours}, lambda: None)
    return {**row, "plain_microseconds": statistics.median(plain), "launches": operations.count}


def reserved_by_formula(server: RunningServer) -> int:
    """Slots that the running requests may still take: up to their next round, or to the end of their answers."""
    total, rules = 0, server.config
    for request in server.requests:
        kv = request.kv
        frozen = max(kv.cache_protected_len, rules.sinks, FROZEN)
        evicted = request.triattention.evicted_tokens
        end = len(request.origin_input_ids) + request.sampling_params.max_new_tokens - 1 - evicted
        bound = min(frozen + rules.budget_for(frozen) + rules.interval, end)
        total += max(bound, kv.kv_committed_len + 1) - kv.kv_allocated_len
    return total


def check_arguments() -> None:
    """Raises SystemExit unless the kernels, with the arguments of their launches, do what their references do."""
    held = []
    for kernels in (True, False):
        server, before = RunningServer(5, layers=2, kernels=kernels, content=True), LAUNCHES.total()
        with interpreting():
            while not server.rounds:
                server.decode()
                server.step()
        if kernels and LAUNCHES.total() == before:
            raise SystemExit("rounds launched no kernel")
        held.append(server.held())
    for number, pair in enumerate(zip(*held, strict=True)):
        if not torch.equal(*pair):
            raise SystemExit(f"kernels were given wrong arguments: request {number} does not hold what it should")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="What compression costs the scheduler's host in a step.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--running", type=int, nargs="+", help="running requests")
    parser.add_argument("--cycles", type=int, default=6, help="intervals of steps (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="16 and 256 requests, 2 intervals; less than a minute")
    arguments = parser.parse_args(argv)
    running = arguments.running or (QUICK_RUNNING if arguments.quick else RUNNING)
    publish_settings()
    torch.set_num_threads(1)
    with torch.inference_mode(), null_driver():
        check_arguments()
        # Kernels are loaded, and caches filled.
        kinds_of_steps(RunningServer(16), INTERVAL)
        found = [row for each in running for row in measure(each, 2 if arguments.quick else arguments.cycles)]
    report(found, arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
