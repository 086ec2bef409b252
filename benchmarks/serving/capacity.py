"""What does freed memory buy? The same requests on a pool of fixed size, with compression and without it.

All requests arrive at once and share their first tokens, which the tree holds. `mean_running` is the time average of
the number of requests that decode together, `tokens_per_second` all generated tokens over the whole run time. The two
servers alternate, and figures are medians over the runs. On a CPU the tokens per second grow slowly with the batch,
because SGLang's attention loops over requests there; the number of running requests is what carries over to a GPU.

    python -m benchmarks.serving.capacity --json capacity.json
    python -m benchmarks.serving.capacity --shape Qwen3-8B --requests 128 --pool 65536 --budget 512 --tokens 2048

What follows `--` are further flags of both servers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import requests

from benchmarks.common import print_table, write
from benchmarks.serving.servers import (
    VOCABULARY,
    add_shape,
    asked_model,
    model_name,
    options_and_flags,
    serving,
    sizes_asked,
)
from server import exit_on_signals

SHARED, OWN = 64, 8
POLL_S = 0.1


@dataclass(frozen=True)
class Sizes:
    """Requests, and tokens: of the pool, and of each request."""

    requests: int = 12
    pool: int = 4096
    budget: int = 256
    interval: int = 64
    tokens: int = 1000


QUICK = Sizes(pool=1280, budget=64, interval=16, tokens=360)
"""A third of the lengths: as with all of them, three dense requests fit, or every compacted one."""


def server_args(compressed: bool, stats: str, sizes: Sizes) -> list[str]:
    args = ["--max-total-tokens", str(sizes.pool)]
    if compressed:
        args += ["--enable-triattention", "--triattention-stats", stats]
        args += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(sizes.interval)]
    return args


def prompts(count: int) -> list[list[int]]:
    """Token ids of so many requests: SHARED equal ones, then OWN of each."""
    stem = [3 + 7 * i % (VOCABULARY - 3) for i in range(SHARED)]
    return [[*stem, *(3 + (11 * i + 37 * number) % (VOCABULARY - 3) for i in range(OWN))] for number in range(count)]


def generate(url: str, ids: list[int], tokens: int) -> dict:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = requests.post(f"{url}/generate", json={"input_ids": ids, "sampling_params": sampling}, timeout=3600)
    response.raise_for_status()
    return response.json()


SEEN = ("num_running_reqs", "num_used_tokens")


class Watch(threading.Thread):
    """Polls what all replicas of these servers run and hold, into `seen` as [seconds, running requests, slots in
    use]."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(daemon=True)
        self._urls, self._start, self._ended = urls, time.monotonic(), threading.Event()
        self.seen: list[list[float]] = []

    def run(self) -> None:
        while not self._ended.wait(POLL_S):
            answers = [requests.get(f"{url}/v1/loads?include=core", timeout=60).json() for url in self._urls]
            loads = [load for answer in answers for load in answer["loads"]]
            now = round(time.monotonic() - self._start, 2)
            self.seen.append([now, *(sum(load[name] for load in loads) for name in SEEN)])

    def end(self) -> list[list[float]]:
        self._ended.set()
        self.join()
        return self.seen


def measure(url: str, sizes: Sizes, decoders: Sequence[str] = ()) -> dict:
    """One run of all requests; the shared tokens are already in the tree.

    Args:
        url: where requests are sent.
        decoders: URLs of the servers that decode them, if that is another.
    """
    generate(url, prompts(1)[0][:SHARED], 1)
    watch = Watch(decoders or [url])
    watch.start()
    start = time.monotonic()
    with ThreadPoolExecutor(sizes.requests) as pool:
        answers = list(pool.map(lambda ids: generate(url, ids, sizes.tokens), prompts(sizes.requests)))
    seconds = time.monotonic() - start
    timeline = watch.end()
    facts = [answer["meta_info"] for answer in answers]
    drafting = [fact["spec_accept_length"] for fact in facts if "spec_accept_length" in fact]
    return {
        "finished": sum(fact["completion_tokens"] == sizes.tokens for fact in facts),
        "retractions": sum(fact["num_retractions"] for fact in facts),
        "mean_running": statistics.fmean(running for _, running, _ in timeline),
        "peak_slots": max(used for _, _, used in timeline),
        "tokens_per_second": sum(fact["completion_tokens"] for fact in facts) / seconds,
        **({"tokens_per_step": statistics.fmean(drafting)} if drafting else {}),
        "timeline": timeline,
    }


def median_of(runs: list[dict]) -> dict:
    """The run of median throughput, so that its figures and its timeline belong together."""
    return sorted(runs, key=lambda run: run["tokens_per_second"])[(len(runs) - 1) // 2]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the servers' flags, which follow `--`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a third of all lengths, one run of each server")
    parser.add_argument("--requests", type=int, help="that arrive at once (12)")
    parser.add_argument("--pool", type=int, help="tokens of the pool (4096, or 1280 with --quick)")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--interval", type=int)
    parser.add_argument("--tokens", type=int, help="generated tokens of a request (1000, or 360 with --quick)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--model", help="served with random token ids; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics")
    add_shape(parser)
    return options_and_flags(parser, argv)


def main() -> None:
    options, flags = parse(sys.argv[1:])
    runs = 1 if options.quick else options.runs
    sizes = sizes_asked(QUICK if options.quick else Sizes(), options)
    results: dict[str, list[dict]] = {"plain": [], "compressed": []}
    with asked_model(options) as (model, stats), TemporaryDirectory() as logs:
        for run in range(runs):
            for name, measured in results.items():
                args = [*server_args(name == "compressed", stats, sizes), *flags]
                with serving(model, args, Path(logs) / f"{name}-{run}.log") as server:
                    measured.append(measure(server.url, sizes))
    medians = {name: median_of(measured) for name, measured in results.items()}
    shown = [key for key in medians["plain"] if key != "timeline"]
    print_table(["server", *shown], [[name, *(row[key] for key in shown)] for name, row in medians.items()])
    ratios = {key: medians["compressed"][key] / medians["plain"][key] for key in ("mean_running", "tokens_per_second")}
    print(f"compressed / plain: {ratios['mean_running']:.2f} running, {ratios['tokens_per_second']:.2f} tokens/s")
    setting = {
        "model": model_name(options),
        "flags": flags,
        "prompt": SHARED + OWN,
        "shared": SHARED,
        **asdict(sizes),
        "runs": runs,
    }
    write({"setting": setting, **medians, "ratios": ratios}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
