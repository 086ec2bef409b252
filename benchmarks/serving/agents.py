"""What does a turn of an agent cost, with exact reuse and with compressed continuation?

Several agents at once share a long first prompt (instructions and tools). In every turn each agent adds a short message
and generates an answer that outgrows its budget. `exact` prefills again the part of the last answer that the tree could
not take; `continued` names a conversation and resumes after its compressed row; `found` names nothing, on a server that
finds the row by the prompt's tokens (--triattention-conversations auto). For every turn: prefilled tokens and
milliseconds until the first token, medians over the agents; `held_slots` of the pool are held at the end.
`answers_equal_cold` counts the answers that equal those of a server with nothing cached; one that goes on after a
compressed row sees less of the past than that.

    python -m benchmarks.serving.agents --json agents.json
"""

from __future__ import annotations

import argparse
import statistics
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory

import requests

from benchmarks.common import print_table, write
from benchmarks.serving.client import compression_of
from benchmarks.serving.servers import VOCABULARY, prepared_model, serving
from benchmarks.serving.streamed import streamed
from server import exit_on_signals

AGENTS, MESSAGE = 4, 20
BUDGET, INTERVAL = 256, 64
POOL = 32768


def tokens_of(seed: int, count: int) -> list[int]:
    return [3 + (seed * 7919 + i * (2 * seed + 31) + i * i) % (VOCABULARY - 3) for i in range(count)]


def ask(url: str, ids: list[int], tokens: int, conversation: str | None, key: str | None = None) -> dict:
    """One streamed turn: output ids, prefilled tokens, milliseconds until the first token, and how it started.

    Args:
        key: SGLang's `extra_key`: the turn finds in the tree only what turns with the same key left there.
    """
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    if conversation is not None:
        sampling["custom_params"] = {"triattention": {"conversation": conversation}}
    last, ttft_ms = streamed(url, {"input_ids": ids, "sampling_params": sampling, "extra_key": key})
    facts = last["meta_info"]
    return {
        "output": last["output_ids"],
        "prefilled": facts["prompt_tokens"] - facts["cached_tokens"],
        "ttft_ms": ttft_ms,
        "start": facts["triattention"].get("conversation"),
    }


def run_agent(url: str, number: int, turns: int, shared: int, tokens: int, continued: bool) -> list[dict]:
    ids, answers = tokens_of(1, shared), []
    for turn in range(turns):
        ids = ids + tokens_of(100 + 10 * number + turn, MESSAGE)
        answer = ask(url, ids, tokens, f"agent {number}" if continued else None)
        answers.append({**answer, "prompt": ids})
        ids = ids + answer["output"]
    return answers


def run_agents(url: str, turns: int, shared: int, tokens: int, continued: bool) -> list[list[dict]]:
    """Answers by [agent][turn]; the shared prompt is already in the tree, as on a server that has run for a while."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    ask(url, tokens_of(1, shared), 1, None)
    with ThreadPoolExecutor(AGENTS) as pool:
        return list(pool.map(lambda n: run_agent(url, n, turns, shared, tokens, continued), range(AGENTS)))


def equal_cold(url: str, agents: list[list[dict]], tokens: int) -> int:
    """How many answers equal those of a server with nothing cached: each is asked for again under a key of its own."""
    requests.post(f"{url}/flush_cache", timeout=60).raise_for_status()
    answers = [answer for turns in agents for answer in turns]

    def is_equal(number: int) -> bool:
        cold = ask(url, answers[number]["prompt"], tokens, None, key=f"cold {number}")
        assert cold["prefilled"] == len(answers[number]["prompt"])
        return cold["output"] == answers[number]["output"]

    with ThreadPoolExecutor(AGENTS) as pool:
        return sum(pool.map(is_equal, range(len(answers))))


def slots_in_use(url: str) -> int:
    """KV slots of the pool that the tree and idle rows hold."""
    state = compression_of(url)
    return state["pool_slots"] - state["pool_free_slots"]


def summary(agents: list[list[dict]]) -> dict:
    by_turn = list(zip(*agents, strict=True))
    return {
        "prefilled_tokens_per_turn": [statistics.median(a["prefilled"] for a in turn) for turn in by_turn],
        "ttft_ms_per_turn": [statistics.median(a["ttft_ms"] for a in turn) for turn in by_turn],
        "starts": [sorted({str(a["start"]) for a in turn}) for turn in by_turn],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="fewer turns and tokens")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=600, help="generated tokens of a turn")
    parser.add_argument("--shared", type=int, default=1500, help="tokens of the shared prompt")
    parser.add_argument("--model", help="served with random token ids; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics")
    options = parser.parse_args()
    turns, shared, tokens = options.turns, options.shared, options.tokens
    if options.quick:
        turns, shared, tokens = 3, 300, 350
    results: dict[str, dict] = {}
    with prepared_model(options.model, options.stats) as (model, stats), TemporaryDirectory() as logs:
        args = ["--max-total-tokens", str(POOL), "--enable-triattention", "--triattention-stats", stats]
        args += ["--triattention-budget", str(BUDGET), "--triattention-interval", str(INTERVAL)]
        for conversations, names in (("named", ("exact", "continued")), ("auto", ("found",))):
            every = [*args, "--triattention-conversations", conversations]
            with serving(model, every, Path(logs) / f"{conversations}.log") as server:
                for name in names:
                    agents = run_agents(server.url, turns, shared, tokens, name == "continued")
                    results[name] = {"agents": agents, **summary(agents), "held_slots": slots_in_use(server.url)}
                for name in names:
                    agents = results[name].pop("agents")
                    results[name]["cold_answers"] = equal_cold(server.url, agents, tokens)
                    results[name]["answers_equal_cold"] = results[name]["cold_answers"] == AGENTS * turns
    keys = {"prefilled_tokens_per_turn": "prefilled", "ttft_ms_per_turn": "ms to first token"}
    rows = [[turn + 1, *(results[name][key][turn] for key in keys for name in results)] for turn in range(turns)]
    print_table(["turn", *(f"{name}: {shown}" for shown in keys.values() for name in results)], rows)
    for name, result in results.items():
        print(f"{name}: {result['cold_answers']} of {AGENTS * turns} answers equal a cold server's")
    setting = {
        "model": options.model or "tiny random Llama",
        "agents": AGENTS,
        "turns": turns,
        "shared": shared,
        "message": MESSAGE,
        "tokens": tokens,
        "budget": BUDGET,
        "interval": INTERVAL,
    }
    write({"setting": setting, **results}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
