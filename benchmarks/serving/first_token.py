"""Which part of the time to an agent's first token grows with the turns of its conversation?

One agent at a time on an otherwise idle server. Each turn brings as many tokens, which stay, and its answer outgrows
budget and interval, so that every turn has a round. SGLang's clock in the scheduler divides the time to the first
token:

    forward_ms  the prefill of the new tokens, from the batch's launch until its result; attention reads the whole row
    rest_ms     all else: HTTP, the search for the row, admission, the answer's way back

Policies, on one server with `--triattention-conversations auto`: `dense` (not compressed), `keep` (a conversation) and
`auto` (the row is found by the prompt's tokens). Times are the least of the agents', to which other processes only add;
`growth` is the median of the last three turns over that of turns 2 to 4. Flags of the server follow `--`.

    python -m benchmarks.serving.first_token --json first-token.json
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import print_table, write
from benchmarks.serving.agents import tokens_of
from benchmarks.serving.servers import (
    add_shape,
    asked_model,
    model_name,
    options_and_flags,
    serving,
    sizes_asked,
    threads,
)
from benchmarks.serving.streamed import streamed
from server import exit_on_signals

MOST_GROWTH = 1.3
"""Goal for `rest_ms`."""
COUNTS = ("history", "held", "prefilled")
PARTS = ("ttft_ms", "forward_ms", "rest_ms")
COMPARED = 3
"""Turns at each end of a conversation that are compared."""
POLICIES = ("dense", "keep", "auto")


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for agents and turns."""

    agents: int = 2
    turns: int = 16
    first: int = 200
    message: int = 400
    answer: int = 56
    budget: int = 24
    interval: int = 16


QUICK = Sizes(agents=1, turns=8, message=40)


def ask(url: str, ids: list[int], sizes: Sizes, policy: str, agent: str) -> tuple[list[int], dict]:
    """One streamed turn: what was answered, and what it took."""
    settings: dict = {"dense": {"enabled": False}, "keep": {"conversation": agent}}.get(policy, {})
    sampling = {"max_new_tokens": sizes.answer, "temperature": 0, "ignore_eos": True}
    body = {
        "input_ids": ids,
        "sampling_params": {**sampling, "custom_params": {"triattention": settings}},
        "extra_key": agent,
    }
    last, ttft_ms = streamed(url, body)
    facts = last["meta_info"]
    forward_ms = 1e3 * (facts["prefill_finished_time"] - facts["forward_entry_time"])
    report = facts["triattention"]
    return last["output_ids"], {
        "start": report.get("conversation", "none"),
        "history": len(ids),
        "held": report.get("physical_length", len(ids) + sizes.answer - 1),
        "prefilled": facts["prompt_tokens"] - facts["cached_tokens"],
        "ttft_ms": ttft_ms,
        "forward_ms": forward_ms,
        "rest_ms": ttft_ms - forward_ms,
    }


def run_agent(url: str, sizes: Sizes, policy: str, number: int) -> list[dict]:
    """One row a turn."""
    ids, turns = tokens_of(1000 * number, sizes.first), []
    for turn in range(sizes.turns):
        if turn:
            ids = ids + tokens_of(1000 * number + turn, sizes.message)
        output, row = ask(url, ids, sizes, policy, f"{policy} {number}")
        ids = ids + output
        turns.append(row)
    return turns


def turn_rows(policy: str, agents: Sequence[Sequence[dict]]) -> list[dict]:
    """One row a turn: the least times of the agents, and medians of the rest."""
    rows = []
    for number, turns in enumerate(zip(*agents, strict=True), 1):
        row = {"policy": policy, "turn": number, "starts": sorted({turn["start"] for turn in turns})}
        for key in COUNTS + PARTS:
            row[key] = (min if key in PARTS else statistics.median)(turn[key] for turn in turns)
        rows.append(row)
    return rows


def growths(rows: Sequence[dict]) -> list[dict]:
    """How each part grows from the first turns that resume to the last ones; the rest is held to the goal."""
    found = []
    for policy in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == policy]
        for part in PARTS:
            early, late = (
                statistics.median(row[part] for row in some) for some in (own[1 : 1 + COMPARED], own[-COMPARED:])
            )
            most = MOST_GROWTH if part == "rest_ms" and policy != "dense" else None
            found.append(
                {
                    "policy": policy,
                    "part": part,
                    "early_ms": early,
                    "late_ms": late,
                    "growth": late / early,
                    "at_most": most,
                    "met": None if most is None else late / early <= most,
                }
            )
    return found


def measure(model: str, stats: str, sizes: Sizes, flags: Sequence[str]) -> list[dict]:
    """The rows of all policies."""
    longest = sizes.first + sizes.turns * (sizes.message + sizes.answer)
    # The tree and idle rows of all agents fit, so that no turn makes room.
    args = ["--max-total-tokens", str(2 * len(POLICIES) * sizes.agents * longest), "--enable-metrics"]
    args += ["--enable-triattention", "--triattention-stats", stats, "--triattention-conversations", "auto"]
    args += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(sizes.interval), *flags]
    rows: list[dict] = []
    with TemporaryDirectory() as logs, serving(model, args, Path(logs) / "server.log") as server:
        for policy in POLICIES:
            # One more, before the clock counts.
            run_agent(server.url, QUICK, policy, sizes.agents)
            rows += turn_rows(policy, [run_agent(server.url, sizes, policy, number) for number in range(sizes.agents)])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one agent, a few short turns")
    parser.add_argument("--model", help="served with random token ids; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics")
    add_shape(parser)
    parser.add_argument("--agents", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--message", type=int, help="tokens that a turn brings")
    parser.add_argument("--answer", type=int, help="tokens that a turn generates")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--interval", type=int)
    options, flags = options_and_flags(parser, sys.argv[1:])
    sizes = sizes_asked(QUICK if options.quick else Sizes(), options)
    with asked_model(options) as (model, stats):
        rows = measure(model, stats, sizes, flags)
    judged = growths(rows)
    print_table(list(rows[0]), [list(row.values()) for row in rows if row["turn"] in (1, 2, sizes.turns)])
    print_table(list(judged[0]), [list(row.values()) for row in judged])
    setting = {"model": model_name(options), "flags": flags}
    write(
        {"setting": {**setting, "threads": threads(), **asdict(sizes)}, "turns": rows, "growths": judged},
        options.json,
        options.quick,
    )


if __name__ == "__main__":
    exit_on_signals()
    main()
