"""The machinery of the decode benchmark: the model, one pool of KV memory, and timed runs that alternate."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from benchmarks.decode.batch import Batch, Pool, Rounds
from benchmarks.decode.check import check
from benchmarks.decode.model import Model, Shape
from benchmarks.decode.step import CudaGraphs, Eager, Run, Step
from benchmarks.rounds.score_speed import copy_bandwidth
from sglang_triattn.config import Config
from sglang_triattn.kernels.score.tables import ScoreTables, build_tables
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.rounds.level import LOT
from sglang_triattn.rounds.rules import RoundRules, complete

WARM = 3
"""Untimed steps before the timed ones."""

CHECKED = 4
"""Steps of a check; the checked requests' rounds are due before the second one."""

RESERVE = 4 << 30
"""Device memory reserved for everything but weights and KV: activations, graphs, FlashInfer's and the scorer's
workspace."""


class Way(NamedTuple):
    """A way of compacting."""

    page_size: int
    selection: str

    @property
    def compaction(self) -> str:
        """What a round does, as the server chooses it: one kept set needs no K and V to move."""
        return "remap" if self.page_size == 1 and selection_named(self.selection).shared else "fill"


DEFAULT = Way(1, Config().selection)
WAYS = (DEFAULT, Way(1, "shared-mean"), Way(16, "per-layer-head"))
ARRANGEMENTS = ("spread", "together", "level")
"""When the requests of a batch have their rounds: one after the other, all in one step, or LOT in one step."""


@dataclass(frozen=True)
class Setting:
    """What is measured. Lengths are in tokens, `memories` in bytes of KV.

    Attributes:
        scale: factor by which lengths and memories are smaller than in a whole run.
        pool: the most KV memory to take, in bytes, or None.
    """

    shape: Shape
    layers: int
    batches: Sequence[int]
    contexts: Sequence[int]
    budgets: Sequence[int]
    interval: int
    memories: Sequence[float]
    repeats: int
    device: str
    scale: int = 1
    pool: float | None = None

    @property
    def positions(self) -> int:
        """Highest logical position that any run reaches, and number of slots that a row names."""
        return (
            max(*self.contexts, *(self.config(budget, DEFAULT).budget for budget in self.budgets))
            + 4 * self.interval
            + 64
        )

    def config(self, budget: int, way: Way) -> RoundRules:
        recent = min(128, self.interval, budget // 2)
        return complete(Config(budget=budget, interval=self.interval, recent=recent, selection=way.selection))


class Bench:
    """Weights and the pool, shared by all runs.

    Args:
        kind: kind of attention, one of `decode_attention.KINDS`.
    """

    def __init__(self, setting: Setting, kind: type) -> None:
        self.setting, self.kind, shape = setting, kind, setting.shape
        self.runtime = CudaGraphs() if setting.device == "cuda" else Eager()
        self.bandwidth = _bandwidth(setting.device)
        weights = shape.held_bytes(setting.layers)
        available = torch.cuda.mem_get_info()[0] - RESERVE if setting.device == "cuda" else 1 << 30
        if weights >= available:
            raise SystemExit(
                f"{shape.name} with {setting.layers} layers has {weights / 1e9:.1f} GB of weights, and "
                f"{max(available, 0) / 1e9:.1f} GB are free: ask for fewer with --layers."
            )
        self.model = Model(shape, setting.layers, setting.positions, setting.device)
        room = available - weights
        self.pool = Pool(shape, int(min(room, setting.pool or room, self._most_bytes())), setting.device)
        self.tables = random_tables(shape, setting.layers, self.model.inv_freq, setting.device)

    def _most_bytes(self) -> int:
        """KV memory that the largest measurement needs."""
        s = self.setting
        token = s.shape.kv_bytes(s.layers)
        # Plus page 0.
        return (
            max([max(s.batches) * s.positions * token, *map(self.memory_of, s.memories)])
            + max(way.page_size for way in WAYS) * token
        )

    def memory_of(self, memory: float) -> int:
        """Scales `memory`, the bytes that all of the model's layers need, to this run's layers."""
        return int(memory * self.setting.layers / self.setting.shape.layers)

    def step(self, requests: int, layers: int | None = None) -> Step:
        buffers = self.pool.buffers(layers or self.setting.layers)
        return Step(self.model, buffers, self.kind, requests, self.setting.positions, self.runtime)

    def rounds(self, step: Step, budget: int, way: Way) -> Rounds:
        tables = self.tables[: len(step.buffers[0])]
        return Rounds.of(self.setting.config(budget, way), way.compaction, step.buffers, tables)

    def dense(self, step: Step, context: int) -> Runner:
        """Requests that hold all of their `context` tokens at the end of the run."""
        steps = self.setting.interval
        first = context - steps - WARM
        return Runner(step, step.batch(1), [first] * step.requests, first, steps, context)

    def compressed(self, step: Step, context: int, budget: int, way: Way, arrangement: str = "spread") -> Runner | None:
        """Compressed requests at the same position; None if that is too early for a round.

        Each has one round in `interval` steps.

        Args:
            arrangement: one of ARRANGEMENTS.
        """
        steps = self.setting.interval
        rounds = self.rounds(step, budget, way)
        first, bound = context - steps - WARM, rounds.bound
        if first < bound:
            return None
        lot = {"spread": 1, "together": step.requests, "level": LOT}[arrangement]
        lengths = [bound - steps + 1 + r // lot * lot * steps // step.requests for r in range(step.requests)]
        return Runner(step, step.batch(way.page_size, rounds), lengths, first, steps, bound)


@dataclass(frozen=True)
class Runner:
    """A repeatable measurement: it starts from the same state each time."""

    step: Step
    batch: Batch
    lengths: list[int]
    logical: int
    steps: int
    most: int

    def slots(self) -> int:
        """Slots that it needs in the pool."""
        return self.batch.slots_for(len(self.lengths), self.most)

    def fits(self) -> bool:
        return self.slots() <= len(self.step.buffers[0][0])

    def start(self, lengths: list[int] | None = None) -> None:
        lengths = lengths or self.lengths
        self.batch.start(lengths, [max(self.logical, length) for length in lengths], self.most)

    def check(self, what: str) -> float:
        """See `decode_check.check`; rounds of the first and the last request are due at the second step."""
        lengths = list(self.lengths)
        if self.batch.rounds is not None:
            lengths[0] = lengths[-1] = self.batch.rounds.bound - 1
        self.start(lengths)
        return check(self.step, self.batch, CHECKED, what)

    def run(self) -> Run:
        self.start()
        return self.step.timed(self.batch, self.steps, WARM)


def alternate(runners: Sequence[Runner], repeats: int) -> list[list[Run]]:
    """`repeats` runs of each, in turn, so that a device that slows down slows all."""
    runs = [[runner.run() for runner in runners] for _ in range(repeats)]
    return [list(own) for own in zip(*runs, strict=True)] if runners else []


@dataclass(frozen=True)
class Figures:
    """Medians over the runs of one measurement; rates in tokens per second of all requests together."""

    tokens_s: float
    ceiling: float
    round_us: float | None
    round_share: float | None

    @property
    def share(self) -> float:
        return self.tokens_s / self.ceiling


def figures(bench: Bench, step: Step, runs: Sequence[Run]) -> Figures:
    """The ceiling is the rate at which only the bytes of weights and KV are read, at the device's copy bandwidth."""
    layers = len(step.buffers[0])
    shape, first = bench.setting.shape, runs[0]
    count = first.steps * shape.read_bytes(layers) + first.kv_tokens * shape.kv_bytes(layers)
    rounds = [seconds for run in runs for seconds in run.rounds]
    return Figures(
        tokens_s=statistics.median(run.tokens / run.seconds for run in runs),
        ceiling=first.tokens * bench.bandwidth / count,
        round_us=statistics.median(rounds) * 1e6 if rounds else None,
        round_share=statistics.median(sum(run.rounds) / run.seconds for run in runs) if rounds else None,
    )


def random_tables(shape: Shape, layers: int, inv_freq: torch.Tensor, device: str) -> ScoreTables:
    """Random statistics: the cost of a round does not depend on them."""
    generator = torch.Generator().manual_seed(3)
    size = (layers, shape.q_heads, shape.head_dim // 2)
    mean = torch.complex(torch.randn(size, generator=generator), torch.randn(size, generator=generator))
    return build_tables(mean, mean.abs() * 1.3, inv_freq, 1.0, "half", shape.kv_heads, device)


def _bandwidth(device: str) -> float:
    """Bytes read and written per second by a copy, best of several."""
    measure: Callable[[], float] = copy_bandwidth(2 << 30 if device == "cuda" else 32 << 20, device)
    measure()
    best = max(measure() for _ in range(8))
    del measure
    if device == "cuda":
        torch.cuda.empty_cache()
    return best
