"""Bytes of a decode step, dense and compressed: what a GPU reads at least, and the ceiling of a speed-up by that.

Arithmetic, not measured. A decode step of many requests takes at least as long as its memory needs to deliver the
weights and the KV that it reads, so the quotient of the bytes is a ceiling of what compression can gain: activations,
launches and communication take the same time in both and only lower it. Bytes are those of one GPU, and equal GPUs that
share a model read equally many.
"""

from __future__ import annotations

from dataclasses import dataclass

from sglang_triattn.capacity import Gpus, Workload
from sglang_triattn.kernels.select import selection_named
from sglang_triattn.model.kinds import FULL, LATENT, WINDOW
from sglang_triattn.model.layout import AttentionLayout
from sglang_triattn.model.sizes import ModelSizes, element_bytes
from sglang_triattn.model.weights import WeightBytes
from sglang_triattn.rounds.plan import Plan, frozen_length, plan_round
from sglang_triattn.rounds.rules import RoundRules

# Of a score, a slot, an importance and a size of a value; and of a token's number in a list, written and read.
_WORD, _NUMBER = 4, 2 * 8


@dataclass(frozen=True)
class KvReads:
    """KV bytes that one GPU reads for one request in a decode step.

    Attributes:
        per_token: bytes per token of the row, of layers that attend to all of it. A layer that reads the KV of another
            reads it once more.
        windows: for each size of window in tokens, bytes per token of the layers that have it.
    """

    per_token: int
    windows: tuple[tuple[int, int], ...]

    def of(self, row: float) -> float:
        """Bytes for a row of so many tokens."""
        return self.per_token * row + sum(size * min(window, row) for window, size in self.windows)


def kv_reads(layout: AttentionLayout, kv_dtype: str, ranks: int) -> KvReads:
    """What one of `ranks` GPUs reads; layers without attention, and states of fixed size, are not in it."""
    size, windows = element_bytes(kv_dtype), {}
    for layer in layout.layers:
        if layer.kind == WINDOW:
            windows[layer.window] = windows.get(layer.window, 0) + layer.elements(ranks) * size
    full = sum(layer.elements(ranks) for layer in layout.layers if layer.kind in (FULL, LATENT))
    return KvReads(full * size, tuple(sorted(windows.items())))


@dataclass(frozen=True)
class RoundBytes:
    """Bytes that one round of one request reads and writes on one GPU.

    As benchmarks/rounds/score_traffic.py counts them from the kernels' launch parameters, without the constants of
    scores (mean queries, phases, sums): less than a twentieth.

    Attributes:
        keys: keys of all private tokens but the newest, each read once.
        values: values of the same tokens; 0 if no token is chosen by its value.
        scores: one score for each query head and token, written and read once.
        lists: slots, importance, sizes of values, and what stays and moves, for each kept set.
        moves: K/V that rounds copy at most, read and written; 0 where they only rewrite the row.
    """

    keys: int
    values: int
    scores: int
    lists: int
    moves: int

    @property
    def total(self) -> int:
        return self.keys + self.values + self.scores + self.lists + self.moves


def round_bytes(
    layout: AttentionLayout, rules: RoundRules, plan: Plan, *, kv_dtype: str, ranks: int, page_size: int
) -> RoundBytes:
    """What a round costs on one of `ranks` GPUs; arguments as for the server."""
    # These import torch.
    from sglang_triattn.kernels.compact.reference import moves_of
    from sglang_triattn.kernels.score.value_size import value_count

    size = element_bytes(kv_dtype)
    layers = [layout.layers[number] for number in layout.scored]
    heads = [max(layer.kv_heads // ranks, 1) for layer in layers]
    candidates = max(plan.private_length - rules.recent, 0)
    keys = sum(count * layer.head_dim for count, layer in zip(heads, layers, strict=True))
    values = sum(count * layer.v_head_dim for count, layer in zip(heads, layers, strict=True))
    selection = selection_named(rules.selection)
    remaps = page_size == 1 and selection.shared
    # The newest tokens stay where they are.
    older = max(plan.kept_private - rules.recent, 0)
    strategy = "slide" if rules.recency else "fill"
    moved = 0 if remaps else moves_of(strategy, older, older + plan.evicted_tokens)
    sets = selection.sets(len(layers), heads[0])
    by_value = value_count(plan.kept_private, rules.recent, rules.value_share)
    # Slots once for keys and once for values; importance and sizes written and read; a mark for each large value.
    lists = candidates * (sum(heads) * _WORD + sets * 2 * _WORD + (sets * 3 * _WORD if rules.value_share else 0))
    lists += sets * (plan.kept_private * _NUMBER + by_value * (_NUMBER + _WORD) + moved * 4 * _WORD)
    return RoundBytes(
        keys=candidates * keys * size,
        values=candidates * values * size if rules.value_share else 0,
        scores=candidates * sum(layer.q_heads // ranks for layer in layers) * 2 * _WORD,
        lists=lists,
        moves=moved * layout.elements(ranks) * size * 2,
    )


@dataclass(frozen=True)
class Answer:
    """How the row of one request grows while it decodes.

    Attributes:
        rows: for each decode step, the tokens that it attends to, its own included.
        rounds: the round after a step, by the step's number from 0.
    """

    rows: tuple[int, ...]
    rounds: dict[int, Plan]


def decode(rules: RoundRules | None, workload: Workload, page_size: int) -> Answer:
    """The decode steps of one request, dense if `rules` is None.

    A step may take a row to its trigger; the round runs before the next one. The first token of an answer comes from
    the prefill and the last one has no KV, so a step is counted for each token of the answer. After the last step
    there is no round.
    """
    if rules is None:
        return Answer(tuple(range(workload.prompt + 1, workload.length + 1)), {})
    frozen = frozen_length(rules, 0, workload.prompt, page_size)
    rows, rounds, row, evicted = [], {}, workload.prompt, 0
    due = frozen + rules.trigger(frozen)
    steps = workload.length - workload.prompt
    for step in range(steps):
        row += 1
        rows.append(row)
        if row >= due and step + 1 < steps:
            plan = plan_round(rules, frozen=frozen, length=row, evicted_before=evicted, page_size=page_size)
            assert plan is not None
            row, evicted, rounds[step] = plan.new_length, evicted + plan.evicted_tokens, plan
            due = frozen + rules.trigger(frozen, evicted)
    return Answer(tuple(rows), rounds)


@dataclass(frozen=True)
class Step:
    """Bytes that one GPU reads in a decode step of all requests, and those of rounds, spread over the steps."""

    weights: float
    kv: float
    rounds: float = 0.0

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.rounds


@dataclass(frozen=True)
class Model:
    """A model on its GPUs, with a KV cache of this dtype."""

    sizes: ModelSizes
    gpus: Gpus
    kv_dtype: str
    weights: WeightBytes

    def weights_read(self, requests: int) -> float:
        """Bytes of weights that one GPU reads in a step of so many requests, of all groups together."""
        return self.weights.read_bytes(self.gpus.tp, self.gpus.dp, requests)

    @property
    def reads(self) -> KvReads:
        return kv_reads(self.sizes.layout, self.kv_dtype, self.gpus.ranks)

    def round_costs(self, rules: RoundRules, answer: Answer) -> dict[int, int]:
        """Bytes of each round of an answer on one GPU, by the step before it."""
        layout, ranks, page_size = self.sizes.layout, self.gpus.ranks, self.gpus.page_size
        # Most rounds differ in their position alone.
        known: dict[tuple[int, int], int] = {}
        for plan in answer.rounds.values():
            lengths = (plan.private_length, plan.kept_private)
            if lengths not in known:
                found = round_bytes(layout, rules, plan, kv_dtype=self.kv_dtype, ranks=ranks, page_size=page_size)
                known[lengths] = found.total
        return {step: known[plan.private_length, plan.kept_private] for step, plan in answer.rounds.items()}


def mean_step(model: Model, rules: RoundRules | None, workload: Workload, requests: int) -> Step:
    """The mean of all steps of the answer; dense if `rules` is None. An answer of no token has the step after it."""
    longer = Workload(workload.prompt, max(workload.length, workload.prompt + 1))
    answer, reads = decode(rules, longer, model.gpus.page_size), model.reads
    group, steps = model.gpus.group(requests), len(answer.rows)
    kv = sum(map(reads.of, answer.rows)) / steps
    rounds = 0.0
    if rules is not None:
        rounds = sum(model.round_costs(rules, answer).values()) / steps
    return Step(model.weights_read(requests), group * kv, group * rounds)


def last_step(model: Model, rules: RoundRules | None, workload: Workload, requests: int) -> Step:
    """A step at the end of the answer; compressed, the mean of those between two rounds."""
    group, reads = model.gpus.group(requests), model.reads
    rows: list[int] = [workload.length]
    rounds = 0.0
    if rules is not None:
        answer = decode(rules, workload, model.gpus.page_size)
        if answer.rounds:
            step = max(answer.rounds)
            plan = answer.rounds[step]
            due = plan.frozen + rules.trigger(plan.frozen, plan.next_position - plan.new_length)
            rows = list(range(plan.new_length + 1, due + 1))
            rounds = model.round_costs(rules, answer)[step] / len(rows)
    kv = sum(map(reads.of, rows)) / len(rows)
    return Step(model.weights_read(requests), group * kv, group * rounds)


def break_even(model: Model, rules: RoundRules, prompt: int) -> int | None:
    """Shortest length, prompt included, from which on whole answers move fewer bytes compressed, rounds included.

    None if no length up to the context limit does. The weights and the number of requests have no part in it.
    """
    workload, reads = Workload(prompt, model.sizes.context), model.reads
    dense = decode(None, workload, model.gpus.page_size).rows
    answer = decode(rules, workload, model.gpus.page_size)
    costs = model.round_costs(rules, answer)
    saved, last = 0.0, prompt
    for step, (full, row) in enumerate(zip(dense, answer.rows, strict=True)):
        saved += reads.of(full) - reads.of(row)
        # Before the round: none follows the last step of an answer.
        if saved <= 0:
            last = full
        saved -= costs.get(step, 0)
    return last + 1 if last < model.sizes.context else None


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step of `requests` requests, those of all groups together."""

    requests: int
    dense_mean: Step
    dense_end: Step
    compressed_mean: Step
    compressed_end: Step

    @property
    def ceiling_mean(self) -> float:
        """Most that a whole answer can be faster, by bytes."""
        return self.dense_mean.total / self.compressed_mean.total

    @property
    def ceiling_end(self) -> float:
        """Most that a step at the end of the answer can be faster, by bytes."""
        return self.dense_end.total / self.compressed_end.total


def traffic(model: Model, rules: RoundRules, workload: Workload, requests: int) -> Traffic:
    """Bytes of a step of so many requests in each mode, whether they fit or not."""
    return Traffic(
        requests=requests,
        dense_mean=mean_step(model, None, workload, requests),
        dense_end=last_step(model, None, workload, requests),
        compressed_mean=mean_step(model, rules, workload, requests),
        compressed_end=last_step(model, rules, workload, requests),
    )
