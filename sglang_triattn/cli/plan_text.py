"""What `sglang-triattn plan` prints and writes as JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from sglang_triattn.capacity import WINDOW_SHARE, Capacity, Workload
from sglang_triattn.model.kinds import WINDOW
from sglang_triattn.model.sizes import ModelSizes
from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.traffic import Model, Step, Traffic

_COLUMNS = ("bytes per token", "pool tokens", "peak of a request", "longest trace", "requests")
_STEP_COLUMNS = ("weights, GB", "KV, GB", "rounds, GB", "total, GB", "at least, ms")
SPEEDS = ((1.1, "hardly speed"), (1.25, "little speed"), (float("inf"), "speed"))
"""What a ceiling over a whole answer below each number promises: the rest of a step, which is equal, lowers it more."""


@dataclass(frozen=True)
class Findings:
    """All that the command found.

    Attributes:
        rows: dense and compressed, in the model's KV dtype and in 8 bits.
        dense, compressed: the two of `rows` in the KV dtype of `model`.
        bandwidth: bytes per second of one GPU's memory; None if unknown.
        notes: which flags override what --gpu says.
        budget_reason: why this budget was recommended, in words; None if the user chose it.
        traffic: None if no request fits and no number of requests was given; so is `dense_fits`.
        dense_fits: most tokens at which that many requests fit dense; None if not even one token each.
        break_even: see `traffic.break_even`.
        tokens_per_byte: for "dense" and "compressed" rows by name, tokens of all requests per byte that one GPU reads
            over the whole answer, with as many requests as fit.
    """

    model: Model
    rules: RoundRules
    workload: Workload
    rows: list[Capacity]
    dense: Capacity
    compressed: Capacity
    bandwidth: float | None
    notes: list[str]
    budget_reason: str | None
    traffic: Traffic | None
    dense_fits: int | None
    break_even: int | None
    tokens_per_byte: dict[str, float]

    @property
    def experts_touched(self) -> float | None:
        """Expected experts that a step reads in each layer that has them; None without experts, or if unknown."""
        weights = self.model.weights.weights
        if self.traffic is None or weights is None or not weights.experts:
            return None
        return weights.touched(self.traffic.requests)

    @property
    def verdict(self) -> str:
        """What compression can gain, at most."""
        capacity = "capacity" if self.compressed.requests > self.dense.requests else "no capacity"
        if self.traffic is None:
            return capacity
        ceiling = self.traffic.ceiling_mean
        return f"{capacity}, {next(words for below, words in SPEEDS if ceiling < below)}"


def lines(found: Findings) -> list[str]:
    """The whole output."""
    return [*_facts(found), "", *_table(found.rows), "", *_speed(found)]


def to_dict(found: Findings) -> dict[str, Any]:
    """The content of --json: bytes, tokens, seconds; without a bandwidth, all that is about speed is null."""
    gpus, traffic = found.model.gpus, found.traffic
    return {
        "model": _model(found.model.sizes),
        "gpus": {
            **dataclasses.asdict(gpus),
            "kv_bytes": gpus.kv_bytes,
            "weight_share": gpus.weight_share,
            "bandwidth": found.bandwidth,
        },
        "notes": found.notes,
        "settings": dataclasses.asdict(found.rules),
        "request": dataclasses.asdict(found.workload),
        "weights": found.model.weights.origin,
        "kv_dtype": found.model.kv_dtype,
        "rows": [dataclasses.asdict(row) for row in found.rows],
        "recommended_budget": None if found.budget_reason is None else found.rules.budget,
        "speed": None if traffic is None or found.bandwidth is None else _speed_dict(found, traffic, found.bandwidth),
    }


def gib(count: int) -> str:
    return f"{count / (1 << 30):.2f} GiB"


def _model(sizes: ModelSizes) -> dict[str, object]:
    fields = dataclasses.asdict(sizes)
    del fields["layout"]
    return {**fields, "scored_layers": len(sizes.layout.scored), "layer_kinds": sizes.layout.kinds}


def _speed_dict(found: Findings, traffic: Traffic, bandwidth: float) -> dict[str, Any]:
    steps = ("dense_mean", "compressed_mean", "dense_end", "compressed_end")
    return {
        "requests": traffic.requests,
        "experts_touched": found.experts_touched,
        "steps": {
            name: {**dataclasses.asdict(step), "total": step.total, "least_seconds": step.total / bandwidth}
            for name in steps
            for step in (getattr(traffic, name),)
        },
        "ceiling_mean": traffic.ceiling_mean,
        "ceiling_end": traffic.ceiling_end,
        "dense_fits": found.dense_fits,
        "break_even": found.break_even,
        "most_tokens_per_second": {name: each * bandwidth for name, each in found.tokens_per_byte.items()},
        "verdict": found.verdict,
    }


def _facts(found: Findings) -> list[str]:
    model, rules, workload = found.model, found.rules, found.workload
    sizes, gpus = model.sizes, model.gpus
    each = f" on each of {gpus.tp} GPUs" if gpus.tp > 1 else ""
    share = f", or {rules.keep_share:.0%} of the private tokens" if rules.keep_share else ""
    facts = [
        f"model        {sizes.model_type}, {sizes.layers} layers, {sizes.q_heads} query and {sizes.kv_heads} KV heads "
        f"of {sizes.head_dim}, context {sizes.context:,}{_windows(sizes)}",
        f"memory       {gib(gpus.memory_bytes)}{each}, {gpus.reserve:.0%} in reserve",
        *(f"note         {note}" for note in found.notes),
        f"weights      {gib(gpus.weight_share)}{each} ({model.weights.origin})",
        f"KV           {gib(gpus.kv_bytes)}{each}, pages of {gpus.page_size}; with compression "
        f"{gpus.scratch_bytes >> 20} MiB less, for scoring",
        f"compression  {f'{rules.profile}: ' if rules.profile else ''}budget {rules.budget:,} "
        f"({rules.budget_scope}){share}, interval {rules.interval:,}",
        f"request      {workload.length:,} tokens, {workload.prompt:,} of them prompt",
    ]
    if gpus.dp > 1:
        plural = "s" if gpus.ranks > 1 else ""
        facts.insert(-2, f"groups       {gpus.dp} of {gpus.ranks} GPU{plural}, each with requests and KV of its own")
    if sizes.layout.latent and gpus.ranks > 1:
        facts.insert(
            -2, f"latent KV    one head, which each of {gpus.ranks} GPUs holds whole; --dp divides the requests"
        )
    if found.budget_reason is not None:
        facts.append(f"recommended  budget {rules.budget:,}, {found.budget_reason}{_needless(found)}")
    return facts


def _needless(found: Findings) -> str:
    return "; nothing is evicted" if found.compressed.peak_tokens >= found.dense.peak_tokens else ""


def _windows(sizes: ModelSizes) -> str:
    """What the bytes per token leave out."""
    if not sizes.layout.window_pool:
        return ""
    return f"; {sizes.layout.kinds[WINDOW]} layers keep only their window, in {WINDOW_SHARE:.0%} as many slots"


def _table(rows: list[Capacity]) -> list[str]:
    found = [f"{'':13}" + "  ".join(_COLUMNS)]
    for row in rows:
        values = (row.bytes_per_token, row.pool_tokens, row.peak_tokens, row.longest_trace, row.requests)
        cells = [f"{value:{len(title)},}" for title, value in zip(_COLUMNS, values, strict=True)]
        found.append(f"{row.name:<13}" + "  ".join(cells))
    return found


def _speed(found: Findings) -> list[str]:
    """The part on speed, or the line in its place."""
    if found.bandwidth is None:
        return ["speed        left out, because it needs the memory bandwidth: add --gpu, or --bandwidth 3.35T"]
    if found.traffic is None:
        return ["speed        left out, because no such request fits even compressed: add --batch, or lower --prompt"]
    traffic, weights = found.traffic, found.model.weights
    note = "" if weights.weights else "; all weights are counted as read"
    if found.experts_touched is not None and weights.weights is not None:
        note = f"; of each layer {found.experts_touched:.1f} of {weights.weights.experts} experts, if routed at random"
    if found.model.sizes.layout.linear_states:
        note += "; states of fixed size are not counted"
    head = f"step         {traffic.requests:,} requests at once, {found.bandwidth / 1e12:g} TB/s, bytes of one GPU"
    return [head + note, *_step_table(traffic, found.bandwidth), "", *_conclusions(found, traffic, found.bandwidth)]


def _step_table(traffic: Traffic, bandwidth: float) -> list[str]:
    found = [f"{'':27}" + "  ".join(_STEP_COLUMNS)]
    steps = {
        "dense, whole answer": traffic.dense_mean,
        "compressed, whole answer": traffic.compressed_mean,
        "dense, at its end": traffic.dense_end,
        "compressed, at its end": traffic.compressed_end,
    }
    for name, step in steps.items():
        values = _cells(step, bandwidth)
        cells = [f"{value:{len(title)},.2f}" for title, value in zip(_STEP_COLUMNS, values, strict=True)]
        found.append(f"{name:<27}" + "  ".join(cells))
    return found


def _cells(step: Step, bandwidth: float) -> tuple[float, ...]:
    """GB, and milliseconds."""
    return step.weights / 1e9, step.kv / 1e9, step.rounds / 1e9, step.total / 1e9, step.total / bandwidth * 1e3


def _conclusions(found: Findings, traffic: Traffic, bandwidth: float) -> list[str]:
    room = "" if found.dense.requests >= traffic.requests else ", had dense room for them"
    return [
        f"ceiling      {traffic.ceiling_mean:.2f} over the whole answer, {traffic.ceiling_end:.2f} at its end, by bytes"
        f"{room}; not measured",
        f"fit          {_fits(found, traffic)}",
        f"break-even   {_break_even(found)}",
        f"throughput   {_throughput(found, bandwidth)}",
        f"gain         {found.verdict}",
    ]


def _throughput(found: Findings, bandwidth: float) -> str:
    parts = []
    for row, mode in ((found.dense, "dense"), (found.compressed, "compressed")):
        rate = found.tokens_per_byte[row.name] * bandwidth
        parts.append(f"{rate:,.0f} tokens/s {mode} ({row.requests:,} requests)" if row.requests else f"none {mode}")
    return f"at most, with all that fit: {', '.join(parts)}"


def _fits(found: Findings, traffic: Traffic) -> str:
    requests, to_the_end = f"{traffic.requests:,} requests fit", []
    if found.dense_fits is not None and found.dense_fits >= found.workload.length:
        to_the_end.append("dense")
    if found.compressed.requests >= traffic.requests:
        to_the_end.append("compressed")
    parts = [f"{requests} {' and '.join(to_the_end)} to the end"] if to_the_end else []
    if "dense" not in to_the_end:
        up_to = "at no length" if found.dense_fits is None else f"up to {found.dense_fits:,} tokens each"
        parts.append(f"dense {up_to}" if parts else f"{requests} dense {up_to}")
    if "compressed" not in to_the_end:
        parts.append(f"compressed, only {found.compressed.requests:,} do")
    return "; ".join(parts)


def _break_even(found: Findings) -> str:
    if found.break_even is None:
        return f"none up to the context limit: no answer after {found.workload.prompt:,} tokens moves fewer bytes"
    return (
        f"{found.break_even:,} tokens: a shorter request moves no fewer bytes compressed, rounds included, over its "
        "answer"
    )
