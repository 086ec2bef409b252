"""What does a round cost by itself? One pass for several requests at once, on an otherwise idle device."""

from __future__ import annotations

import statistics

import torch

from benchmarks.decode.bench import ARRANGEMENTS, DEFAULT, WAYS, Bench, Way, alternate, figures
from benchmarks.decode.model import BYTES
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.rounds.level import LOT

REPEATS = 10


def time_rounds(bench: Bench) -> list[dict]:
    """One row per way of compacting, budget and number of requests: microseconds, launches included."""
    rows = []
    for way in WAYS:
        for budget in bench.setting.budgets:
            for requests in (1, 8):
                seconds = _one(bench, way, budget, requests)
                rows.append(
                    {
                        "page_size": way.page_size,
                        "compaction": way.compaction,
                        "selection": way.selection,
                        "budget": budget,
                        "requests": requests,
                        "round_us": seconds * 1e6 if seconds else None,
                    }
                )
    return rows


def time_arrangements(bench: Bench, requests: int) -> list[dict]:
    """One row per arrangement of the rounds of a batch, at the longest context with the middle budget.

    `longest_us` is the longest pass of rounds, which delays one step by as much; `step_us` is the mean step, rounds
    included. No row if the requests are fewer than two lots, which all arrangements treat in the same way.
    """
    setting = bench.setting
    context, budget = max(setting.contexts), sorted(setting.budgets)[len(setting.budgets) // 2]
    if requests < 2 * LOT:
        return []
    step = bench.step(requests)
    runners = {name: bench.compressed(step, context, budget, DEFAULT, name) for name in ARRANGEMENTS}
    fitting = {name: runner for name, runner in runners.items() if runner is not None and runner.fits()}
    runs = dict(zip(fitting, alternate(list(fitting.values()), setting.repeats), strict=True))
    rows = []
    for name, own in runs.items():
        passes = [run.rounds for run in own]
        rows.append(
            {
                "batch": requests,
                "context": context,
                "budget": budget,
                "rounds": name,
                "tokens_s": figures(bench, step, own).tokens_s,
                "step_us": statistics.median(run.seconds / run.steps for run in own) * 1e6,
                "passes": len(passes[0]),
                "longest_us": statistics.median(map(max, passes)) * 1e6,
            }
        )
    return rows


def _one(bench: Bench, way: Way, budget: int, requests: int) -> float | None:
    """Median seconds of one pass; None if the pool is too small."""
    runtime = bench.runtime
    step = bench.step(requests)
    rounds = bench.rounds(step, budget, way)
    batch = step.batch(way.page_size, rounds)
    lengths = [rounds.bound] * requests
    if batch.slots_for(requests, rounds.bound) > len(step.buffers[0][0]):
        return None
    marks: list = []
    batch.on_round(lambda: marks.append(runtime.mark()))
    for _ in range(REPEATS + 1):
        batch.start(lengths, [2 * rounds.bound] * requests, rounds.bound)
        runtime.wait()
        batch.prepare()
    runtime.wait()
    # The first pass compiles.
    pairs = zip(marks[2::2], marks[3::2], strict=True)
    return statistics.median(runtime.seconds(*pair) for pair in pairs)


def scoring_share(bench: Bench) -> dict:
    """How fast the scorer reads keys, as a share of the device's copy bandwidth; 8 requests with the middle budget.

    Times passes over the scores alone, without selection; the mean of several consecutive ones.
    """
    setting, runtime, layers = bench.setting, bench.runtime, bench.setting.layers
    budget = sorted(setting.budgets)[len(setting.budgets) // 2]
    tokens, requests = budget + setting.interval, 8
    k = bench.pool.buffers(layers)[0]
    requests = min(requests, len(k[0]) // tokens)
    if not requests:
        return {"requests": 0, "tokens": tokens, "share": None}
    order = torch.randperm(requests * tokens, generator=torch.Generator().manual_seed(4))
    slots = order.view(requests, tokens).to(setting.device, torch.int32)
    lengths = torch.full((requests,), tokens, device=setting.device)
    work = _scoring(bench, k, slots, lengths, lengths + tokens)
    work()
    runtime.wait()
    first = runtime.mark()
    for _ in range(REPEATS):
        work()
    last = runtime.mark()
    runtime.wait()
    shape = setting.shape
    count = slots.numel() * layers * shape.kv_heads * shape.head_dim * BYTES
    rate = REPEATS * count / runtime.seconds(first, last)
    return {"requests": requests, "tokens": tokens, "share": rate / bench.bandwidth}


def _scoring(bench: Bench, k, slots, lengths, positions):
    """All scores as the server makes them, newest tokens included: as many requests at once as its memory holds."""
    scorer = Scorer(k, bench.tables, num_tokens=slots.shape[1], longest=slots.shape[1])

    def work() -> None:
        for _ in scorer.pieces(slots, lengths, positions, recent=0):
            pass

    return work
