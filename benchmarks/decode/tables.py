"""The tables of the decode benchmark: batch by context by budget, fixed memory, and the goals."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.decode.bench import DEFAULT, WAYS, Bench, Figures, Runner, Way, alternate, figures
from benchmarks.decode.step import Step

MOST_REQUESTS = 512
"""Largest batch to try at a fixed memory."""

GOAL_BATCH, GOAL_CONTEXT, GOAL_BUDGET = 32, 16384, 2048
GOALS = {
    "scoring / copy bandwidth": ("at least", 0.8),
    "rounds / time of the steps they serve, worst cell by default": ("at most", 0.01),
    "batch 32, 16k context, budget 2,048: compressed / dense": ("at least", 2.5),
    "batch 32, 16k context, budget 2,048: compressed / ceiling": ("at least", 0.85),
}


class Errors:
    """Checks runners and keeps the largest error that passed."""

    def __init__(self) -> None:
        self.largest = 0.0

    def check(self, runner: Runner, what: str) -> None:
        self.largest = max(self.largest, runner.check(what))


def grid(bench: Bench, errors: Errors, requests: int) -> list[dict]:
    """One row per context and budget for one batch size by default, and by the other ways at the longest context."""
    rows, step, checked = [], bench.step(requests), set()
    for context in bench.setting.contexts:
        ways = WAYS if context == max(bench.setting.contexts) else (DEFAULT,)
        wanted = [(budget, way) for way in ways for budget in bench.setting.budgets]
        rows += _cells(bench, errors, step, context, wanted, checked)
    return rows


def goal_rows(bench: Bench, errors: Errors, rows: list[dict]) -> list[dict]:
    """The goals' cell measured again with as many layers as fit, if the run has that cell and not all layers fit."""
    s = bench.setting
    wanted_rows = [r for r in rows if _is_goal(bench, r)]
    if not wanted_rows or wanted_rows[0]["dense_tokens_s"] is not None:
        return []
    runner = bench.dense(bench.step(wanted_rows[0]["batch"], 1), wanted_rows[0]["context"])
    layers = max((n for n in range(1, s.layers) if runner.slots() <= bench.pool.slots(n)), default=0)
    if not layers:
        return []
    step = bench.step(wanted_rows[0]["batch"], layers)
    return _cells(bench, errors, step, wanted_rows[0]["context"], [(wanted_rows[0]["budget"], DEFAULT)], set())


def _cells(bench: Bench, errors: Errors, step: Step, context: int, wanted, checked: set) -> list[dict]:
    """The rows of one batch size and context, whose runs all alternate."""
    dense, note = bench.dense(step, context), ""
    if not dense.fits():
        note, dense = _too_large(bench, step, dense), None
    runners: dict = {} if dense is None else {"dense": dense}
    notes = {}
    for budget, way in wanted:
        runner = bench.compressed(step, context, budget, way)
        if runner is None:
            notes[budget, way] = "no round yet at this context"
        elif not runner.fits():
            notes[budget, way] = "compressed: " + _too_large(bench, step, runner)
        else:
            runners[budget, way] = runner
    names = {
        key: f"batch {step.requests}, context {context}, {_name(key)}"
        for key in runners
        if key == "dense" or key not in checked
    }
    seen, lack = _measure(bench, errors, runners, names)
    checked |= set(names)
    return [_row(step, context, key, seen, _notes(note and f"dense: {note}", notes.get(key), lack)) for key in wanted]


def _measure(bench: Bench, errors: Errors, runners: dict, names: dict) -> tuple[dict[Any, Figures], str]:
    """Figures of all runners by key, their runs alternating, and why any are missing.

    Args:
        names: of the runners to check first.
    """
    try:
        for key, name in names.items():
            errors.check(runners[key], name)
        runs = alternate(list(runners.values()), bench.setting.repeats)
    except torch.OutOfMemoryError:
        return {}, "the device's memory ran out: lower --pool"
    return {key: figures(bench, runners[key].step, own) for key, own in zip(runners, runs, strict=True)}, ""


def _notes(*parts: str | None) -> str:
    return "; ".join(filter(None, parts))


def _name(key) -> str:
    return key if key == "dense" else f"budget {key[0]}, page size {key[1].page_size}, {key[1].selection}"


def _too_large(bench: Bench, step: Step, runner: Runner) -> str:
    token = bench.setting.shape.kv_bytes(len(step.buffers[0]))
    return f"{runner.slots() * token / 1e9:.1f} GB of KV, {len(step.buffers[0][0]) * token / 1e9:.1f} there"


def _row(step: Step, context: int, key: tuple[int, Way], seen: dict, note: str) -> dict:
    dense, ours = seen.get("dense"), seen.get(key)
    return {
        "batch": step.requests,
        "context": context,
        "budget": key[0],
        "page_size": key[1].page_size,
        "selection": key[1].selection,
        "layers": len(step.buffers[0]),
        "dense_tokens_s": dense and dense.tokens_s,
        "dense_ceiling": dense and dense.ceiling,
        "dense_share": dense and dense.share,
        "compressed_tokens_s": ours and ours.tokens_s,
        "compressed_ceiling": ours and ours.ceiling,
        "compressed_share": ours and ours.share,
        "speedup": _ratio(ours, dense),
        "round_us": ours and ours.round_us,
        "round_share": ours and ours.round_share,
        "note": note,
    }


def _ratio(ours: Figures | None, dense: Figures | None) -> float | None:
    return ours.tokens_s / dense.tokens_s if ours and dense else None


def capacity(bench: Bench, errors: Errors, memory: float) -> list[dict]:
    """At a fixed KV memory: the largest batch and its tokens per second, dense by context and compressed by budget."""
    s = bench.setting
    tokens = bench.memory_of(memory) // s.shape.kv_bytes(s.layers)
    # The most that a request may hold, in slots of page size 1.
    bounds = {("dense", context): context for context in s.contexts}
    bounds |= {("compressed", budget): _bound(bench, budget) for budget in s.budgets}
    batches = {key: min(tokens // bound, MOST_REQUESTS) for key, bound in bounds.items()}
    runners, lack = {}, ""
    # Page 0 comes on top of that.
    if tokens >= bench.pool.slots(s.layers):
        lack = f"the pool holds {bench.pool.slots(s.layers)} of {tokens} tokens"
    else:
        made = {key: _largest(bench, *key, requests) for key, requests in batches.items() if requests}
        runners = {key: runner for key, runner in made.items() if runner is not None}
    names = {(mode, length): f"{memory / 1e9:g} GB of KV, {mode} {length}" for mode, length in runners}
    seen, more = _measure(bench, errors, runners, names)
    rates = {key: own.tokens_s for key, own in seen.items()}
    return [
        {
            "memory_gb": memory / 1e9,
            "context": context,
            "budget": budget,
            "dense_batch": batches["dense", context],
            "dense_batch_tokens_s": (dense := rates.get(("dense", context))),
            "compressed_batch": batches["compressed", budget],
            "compressed_batch_tokens_s": (ours := rates.get(("compressed", budget))),
            "ratio": ours / dense if ours and dense else None,
            "note": _notes(lack, more),
        }
        for context in s.contexts
        for budget in s.budgets
        if context > bounds["compressed", budget]
    ]


def _largest(bench: Bench, mode: str, length: int, requests: int) -> Runner | None:
    """A batch with its own steps, dense at a context or compressed to a budget at the longest context."""
    step = bench.step(requests)
    return (
        bench.dense(step, length)
        if mode == "dense"
        else bench.compressed(step, max(bench.setting.contexts), length, DEFAULT)
    )


def _bound(bench: Bench, budget: int) -> int:
    config = bench.setting.config(budget, DEFAULT)
    return config.sinks + config.trigger(config.sinks)


def _is_goal(bench: Bench, row: dict) -> bool:
    scale = bench.setting.scale
    wanted = (GOAL_BATCH, GOAL_CONTEXT // scale, GOAL_BUDGET // scale, *DEFAULT)
    return tuple(row[name] for name in ("batch", "context", "budget", "page_size", "selection")) == wanted


def goals(bench: Bench, rows: list[dict], fewer: list[dict], scoring: float | None) -> list[dict]:
    """The goals that this run has cells for: what was wanted, what was seen, and whether the goal is met."""
    cell = next((row for row in fewer or rows if _is_goal(bench, row)), {})
    default = [row for row in rows if (row["page_size"], row["selection"]) == DEFAULT]
    shares = [row["round_share"] for row in default if row["round_share"] is not None]
    seen = (scoring, max(shares, default=None), cell.get("speedup"), cell.get("compressed_share"))
    names = list(GOALS)
    table = []
    for name, value in zip(names, seen, strict=True):
        if value is not None:
            relation, wanted = GOALS[name]
            met = value >= wanted if relation == "at least" else value <= wanted
            layers = f" ({cell['layers']} layers)" if name in names[2:] and fewer else ""
            table.append(
                {"goal": name + layers, "wanted": f"{relation} {wanted}", "seen": value, "met": "yes" if met else "no"}
            )
    return table
