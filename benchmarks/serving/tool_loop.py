"""Does an agent still give right answers after a long tool loop, and what does each of its turns cost?

Agents work on a live server. Each turn brings a tool's result; the agent thinks, and calls the next tool. Then it is
asked about all of it, one question after another, none of which stays in the history:

    identifier    case numbers in tools' results, stated once, some of them in the first of them
    state         readings of tanks that changed from result to result: the last one counts
    instruction   rules of the first message
    own           drawers that the agent chose, stated once in what it wrote itself

What an agent writes in its turns is the same under every policy: a logit processor of SGLang makes the server generate
it. Answers are the model's own. An answer is right if it begins with what is asked for, to the last digit; how it
begins up to there is given with the question, so that small models need not find a form.

Policies, all at once on one server with `--triattention-conversations auto`:

    dense     not compressed
    exact     not named, and leaves no row (`release`): what a server does by default without a name
    keep      a conversation, by default: inputs of resumed turns stay, what the agent wrote is compacted
    auto      the same without a name: the row is found by the prompt's tokens
    compact   a conversation with `turn_inputs: compact`: inputs are compacted too
    newest    the same, and of all that is compacted only the newest tokens stay

The chat template keeps the thinking in the history, and, for `dense` and `auto`, leaves that of earlier turns out
(`stripped`).

A turn is sent in two requests. The first ends with the first token, one agent after another with nothing else running:
`ttft_ms` is its time. The second writes the rest, for all agents together. Rows have medians over the agents; `new` are
the tokens that were not in the prompt before; `bound` is what a conversation may hold: what it was given, the last
token of each request, budget and interval. `low` and `high` bound right(policy) - right(dense) of the same history at
95 %, by a bootstrap over agents and their questions.

    python -m benchmarks.serving.tool_loop --model FOLDER --stats FILE --json tool_loop.json
    python -m benchmarks.serving.tool_loop --agents 6 --first-agent 2 --policies dense keep

What follows `--` are further flags of the server.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import print_table, write
from benchmarks.quality.cells import Unit
from benchmarks.quality.model import load_tokenizer
from benchmarks.quality.table import difference
from benchmarks.serving.servers import (
    demonstration_model,
    for_a_server,
    options_and_flags,
    serving,
    sizes_asked,
    threads,
)
from benchmarks.serving.tool_loop_run import Agent, Loop, Policy
from benchmarks.serving.tool_loop_tasks import INPUTS, OWN, SIZES, made
from server import exit_on_signals

MOST_GROWTH = 1.3
"""Goal: the first token of the last turn, over that of turn 2, where both bring as much."""
RESUMED = ("keep", "auto", "compact", "newest")
"""Policies whose turns prefill what is new alone, where the thinking stays in the history."""


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for agents and turns. Agents of other numbers have other work; `first_agent` is the lowest."""

    agents: int = 4
    first_agent: int = 0
    turns: int = 12
    results: tuple[int, int] = (150, 400)
    thoughts: tuple[int, int] = (60, 180)
    budget: int = 96
    interval: int = 32


QUICK = Sizes(agents=1, turns=3, results=(60, 80), thoughts=(16, 32), budget=16, interval=8)


ASKING = 256
"""The server's interval, which questions have; turns ask for a smaller one."""

LONGEST_TURN_S = 86_400
"""Seconds that a named conversation waits: of a model of 1.5B on a CPU, one turn of all agents takes minutes."""


def policies(sizes: Sizes) -> tuple[Policy, ...]:
    default = {"interval": sizes.interval}
    compact = {**default, "turn_inputs": "compact"}
    dense = {"enabled": False}
    return (
        Policy("dense", dense),
        Policy("exact", {**default, "release": True}),
        Policy("keep", default, named=True),
        Policy("auto", default),
        Policy("compact", compact, named=True),
        Policy("newest", {**compact, "recent": sizes.budget}, named=True),
        Policy("dense", dense, stripped=True),
        Policy("auto", default, stripped=True),
    )


STRIPPED = "-stripped"


def label(policy: Policy) -> str:
    """The name of a policy on a command line, which says whether its history has no thinking."""
    return policy.name + STRIPPED * policy.stripped


POLICIES = tuple(map(label, policies(Sizes())))


def turn_rows(agents: Sequence[Agent], sizes: Sizes) -> list[dict]:
    """One row per history, policy and turn, with medians over the agents.

    Keys: new, written: tokens that came in and that the agent wrote; prefilled: tokens computed before the first
    token, of both requests; cached: tokens of the prompt that were not; held: KV entries after the turn; protected: of
    them, inputs of resumed turns; bound: first prompt, inputs, budget and interval; start: how the turn started.
    """
    rows = []
    for group in by_policy(agents):
        for turns in zip(*(agent.turns for agent in group), strict=True):
            row = {"history": group[0].policy.history, "policy": group[0].policy.name, "turn": turns[0]["turn"]}
            for key in ("new", "written", "prefilled", "cached", "ttft_ms", "held", "protected", "rounds"):
                row[key] = statistics.median(turn[key] for turn in turns)
            # At most: a bound must hold for each agent.
            row["over_bound"] = max(turn["held"] - turn["inputs"] - sizes.budget - sizes.interval for turn in turns)
            row["bound"] = statistics.median(turn["inputs"] + sizes.budget + sizes.interval for turn in turns)
            row["starts"] = sorted({turn["start"] for turn in turns})
            rows.append(row)
    return rows


def answer_rows(agents: Sequence[Agent]) -> list[dict]:
    """One row per history, policy and kind of question; the kind `inputs` is all but the agent's own."""
    rows, groups = [], by_policy(agents)
    dense = {group[0].policy.history: group for group in groups if group[0].policy.name == "dense"}
    for group in groups:
        for kind, kinds in (("inputs", INPUTS), *((one, (one,)) for one in INPUTS), (OWN, (OWN,))):
            own, base = (units(agents, kinds) for agents in (group, dense[group[0].policy.history]))
            low, high = difference(own, base, kind)
            pairs = [(a, b) for ours, theirs in zip(own, base, strict=True) for a, b in zip(ours, theirs, strict=True)]
            rows.append(
                {
                    "history": group[0].policy.history,
                    "policy": group[0].policy.name,
                    "kind": kind,
                    "questions": len(pairs),
                    "right": int(sum(a.right for a, _ in pairs)),
                    "lost": sum(a.right < b.right for a, b in pairs),
                    "won": sum(a.right > b.right for a, b in pairs),
                    "low": low,
                    "high": high,
                }
            )
    return rows


def distance_rows(agents: Sequence[Agent]) -> list[dict]:
    """Right answers by how many turns ago the answer was stated last, in four-turn steps."""
    rows = []
    for group in by_policy(agents):
        answers = [answer for agent in group for answer in agent.answers]
        for kind, kinds in (("inputs", INPUTS), (OWN, (OWN,))):
            for step in sorted({answer["turns_ago"] // 4 for answer in answers if answer["kind"] in kinds}):
                found = [one for one in answers if one["kind"] in kinds and one["turns_ago"] // 4 == step]
                rows.append(
                    {
                        "history": group[0].policy.history,
                        "policy": group[0].policy.name,
                        "kind": kind,
                        "turns_ago": f"{4 * step}-{4 * step + 3}",
                        "questions": len(found),
                        "right": sum(one["right"] for one in found),
                    }
                )
    return rows


def units(agents: Sequence[Agent], kinds: Sequence[str]) -> list[list[Unit]]:
    """What an interval draws: [agent][question] of these kinds."""
    return [
        [Unit(float(answer["right"]), 0.0) for answer in agent.answers if answer["kind"] in kinds] for agent in agents
    ]


def by_policy(agents: Sequence[Agent]) -> list[list[Agent]]:
    names = dict.fromkeys((agent.policy.history, agent.policy.name) for agent in agents)
    return [[agent for agent in agents if (agent.policy.history, agent.policy.name) == name] for name in names]


def goals(turns: Sequence[dict], answers: Sequence[dict], agents: Sequence[Agent]) -> list[dict]:
    """What should hold, and whether it does.

    First tokens are judged for policies whose turns resume a row; `dense` shows what the machine adds.
    """
    comparable = (turns[-1]["turn"] - 2) % len(SIZES) == 0
    found: list[tuple[str, float, float | None]] = []
    for history, policy in dict.fromkeys((row["history"], row["policy"]) for row in turns):
        own = [row for row in turns if (row["history"], row["policy"]) == (history, policy)]
        resumed = history == "kept" and policy in RESUMED
        name = f"{policy}, thinking {history}"
        growth = own[-1]["ttft_ms"] / own[1]["ttft_ms"]
        found.append(
            (
                f"{name}: first token of the last turn / of turn 2",
                growth,
                MOST_GROWTH if resumed and comparable else None,
            )
        )
        if resumed:
            found.append((f"{name}: entries above the bound", max(row["over_bound"] for row in own), 0))
            # As where the first turn's answer is too short for a round.
            anew = sum(row["starts"] != ["resumed"] for row in own[1:])
            found.append((f"{name}: turns after the first that some agent did not resume", anew, 0))
            # The token before, whose K/V was missing, once for each of the two requests.
            resumptions = [row["prefilled"] - row["new"] - 2 for row in own if row["starts"] == ["resumed"]]
            over = max(resumptions, default=0)
            found.append((f"{name}: prefilled tokens of a resumed turn that are not new", over, 0))
            asked = [one for agent in agents if (agent.policy.history, agent.policy.name) == (history, policy)
                     for one in agent.answers]  # fmt: skip
            strange = sum(one["start"] != "resumed" or one["rounds"] > 0 for one in asked)
            found.append((f"{name}: questions that were not asked of what the turns left", strange, 0))
        (right,) = (row for row in answers if (row["history"], row["policy"]) == (history, policy)
                    and row["kind"] == "inputs")  # fmt: skip
        if policy != "dense":
            most = None if policy in ("compact", "newest") else 0
            found.append((f"{name}: answers about inputs that dense has right and it has wrong", right["lost"], most))
    return [
        {"goal": name, "value": value, "at_most": most, "met": None if most is None else value <= most}
        for name, value, most in found
    ]


def measure(model: str, stats: str, sizes: Sizes, asked: Sequence[Policy], flags: Sequence[str]) -> list[Agent]:
    """Every agent under every policy that is asked for, with what its turns and answers were."""
    tokenizer = load_tokenizer(model)

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    numbers = range(sizes.first_agent, sizes.first_agent + sizes.agents)
    works = {number: made(number, sizes.turns, sizes.results, sizes.thoughts, count) for number in numbers}
    agents = [Agent(number, policy, work, tokenizer) for number, work in works.items() for policy in asked]
    longest = max(
        sum(count(turn.input + turn.thinking + turn.reply) for turn in work.turns)
        + sum(count(ask.text + ask.answer) + 16 for ask in work.asks)
        for work in works.values()
    )
    args = ["--max-total-tokens", str((longest + 512) * len(agents)), *flags]
    args += ["--enable-triattention", "--triattention-stats", stats, "--triattention-conversations", "auto"]
    args += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(ASKING)]
    args += ["--triattention-conversation-ttl", str(LONGEST_TURN_S)]
    # The processor reads how many tokens a request has, which lags where steps overlap.
    args += ["--enable-custom-logit-processor", "--disable-overlap-schedule"]
    started = time.monotonic()
    with TemporaryDirectory() as logs, serving(model, args, Path(logs) / "server.log") as server:
        Loop(server.url, agents, ASKING).run(
            lambda text: print(f"{time.monotonic() - started:.0f} s: {text}", flush=True)
        )
    return agents


def bounds(text: str) -> tuple[int, int]:
    """LOW-HIGH on a command line."""
    low, _, high = text.partition("-")
    return int(low), int(high)


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the server's flags, which follow `--`.

    Raises:
        SystemExit: policies are asked for without the dense one of the same history, which they are measured against.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one agent, three short turns")
    parser.add_argument("--model", help="one that knows ChatML; by default SmolLM2-135M, as `make model` prepares it")
    parser.add_argument("--stats", help="its statistics; by default measured at launch")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--agents", type=int)
    parser.add_argument("--first-agent", type=int, help="the lowest number of an agent (0): others have other work")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES, help="leave out the others")
    parser.add_argument("--turns", type=int, help="7 or 12 make turn 2 and the last one comparable")
    parser.add_argument("--results", type=bounds, metavar="LOW-HIGH", help="tokens of a tool's result")
    parser.add_argument("--thoughts", type=bounds, metavar="LOW-HIGH", help="tokens of what is thought in a turn")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--interval", type=int)
    options, flags = options_and_flags(parser, argv)
    for name in options.policies:
        dense = f"dense{STRIPPED}" if name.endswith(STRIPPED) else "dense"
        if dense not in options.policies:
            parser.error(f"the policy {name} is measured against {dense}: add {dense} to --policies")
    return options, flags


def main(argv: list[str] | None = None) -> None:
    options, flags = parse(sys.argv[1:] if argv is None else argv)
    sizes = sizes_asked(QUICK if options.quick else Sizes(), options)
    model, stats = (options.model, options.stats or "auto") if options.model else demonstration_model()
    model, stats = map(for_a_server, (model, stats))
    asked = [policy for policy in policies(sizes) if label(policy) in options.policies]
    agents = measure(model, stats, sizes, asked, ["--dtype", options.dtype, *flags])
    turns, answers, distances = turn_rows(agents, sizes), answer_rows(agents), distance_rows(agents)
    judged = goals(turns, answers, agents)
    for rows in (turns, answers, distances, judged):
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    setting = {"model": Path(model).name, "dtype": options.dtype, "threads": threads(), **asdict(sizes), "flags": flags}
    answered = [{"agent": agent.name, "answers": agent.answers} for agent in agents]
    results = {"setting": setting, "turns": turns, "answers": answers, "distances": distances, "goals": judged}
    write({**results, "asked": answered}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
