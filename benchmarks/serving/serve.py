"""What does a user feel? A plain and a compressed server of one model, with equal flags, asked in turns.

    python -m benchmarks.serving.serve --json serve.json
    python -m benchmarks.serving.serve --model FOLDER --budget 2048 --contexts 500,8000,32000
    python -m benchmarks.serving.serve --shape Qwen3-8B --budget 2048 --contexts 500,8000,32000

What follows `--` are further flags of both servers. Both run at the same time; the one that is not asked sleeps. All of
it is repeated with new servers, in the opposite order, and figures are medians over the repeats. Five questions:

- `context`: what does a decode step cost after a prompt of so many tokens? The compressed server compacts the prompt
  while it prefills it (`"prompt": "compact"`): that is the state of a request that has decoded as many tokens, and is
  reached sooner.
- `rounds`: how long is the longest step, among them those at which compaction rounds run? All requests start together,
  so their rounds coincide: as many as may meet in one step.
- `burst`: how long is the longest step where more requests start together? A third server leaves all rounds where they
  are due (`--triattention-rounds-per-step 0`).
- `pool`: what do many requests feel that share a pool too small for all of them? With `--enable-metrics`.
- `overhead`: what does a step cost more while there is nothing to evict? Short runs in turns, without and with
  `--enable-metrics` on both servers.

On CPUs a server has one thread fewer than there are cores: SGLang's other processes and the client need the last one,
and threads that wait for one another spin.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import print_table, write
from benchmarks.serving import client
from benchmarks.serving.client import Load, Run, spread
from benchmarks.serving.servers import (
    add_shape,
    asked_model,
    demonstration_model,
    model_name,
    options_and_flags,
    serving,
    sizes_asked,
    threads,
)
from server import exit_on_signals

SERVERS = ("plain", "compressed")
BURST_SERVERS = (*SERVERS, "compressed, not level")
QUESTIONS = ("context", "rounds", "pool", "burst", "overhead")
MOST_GROWTH, MOST_ROUND, MOST_OVERHEAD = 1.15, 3.0, 1.01
"""Goals: a step at the longest context over one at the shortest, the longest step at a round over the median step, a
step with nothing to evict over a plain one."""
REACH = 1
"""So many tokens before and after the place where a round should show are looked at, too."""


@dataclass(frozen=True)
class Sizes:
    """How much is asked for. All but requests, bursts and pairs are tokens; `burst_lengths` are budget and interval."""

    budget: int = 256
    interval: int = 128
    contexts: tuple[int, ...] = (500, 1000, 2000, 4000, 6000)
    context_requests: int = 1
    chunk: int = 1024
    pool: int = 16384
    requests: int = 8
    prompt: int = 64
    rounds: int = 2
    small_pool: int = 2304
    pool_requests: int = 8
    pool_tokens: int = 704
    bursts: tuple[int, ...] = (32, 128)
    burst_lengths: tuple[int, int] = (64, 32)
    pairs: int = 4
    pair_tokens: int = 64

    @property
    def burst_tokens(self) -> int:
        budget, interval = self.burst_lengths
        return budget + self.rounds * interval + interval // 2

    @property
    def burst_pool(self) -> int:
        return max(self.bursts) * (self.prompt + self.burst_tokens)

    @property
    def rounds_tokens(self) -> int:
        return self.budget + self.rounds * self.interval + self.interval // 2


QUICK = Sizes(
    budget=48, interval=24, contexts=(100, 400), chunk=64, pool=4096, requests=4, prompt=16, rounds=2, small_pool=400,
    pool_requests=6, pool_tokens=160, bursts=(4, 20), burst_lengths=(16, 12), pairs=2, pair_tokens=40,
)  # fmt: skip


@dataclass(frozen=True)
class Group:
    """URLs of the servers, by SERVERS or BURST_SERVERS, and in which order they are asked."""

    urls: dict[str, str]
    order: tuple[str, ...]
    vocabulary: int

    def ask(
        self, load: Load, seed: int, compression: dict | None = None, among: Collection[str] = SERVERS
    ) -> Iterator[tuple[str, Run]]:
        """Yields the answer of each server to the same load, by default of SERVERS alone."""
        for name in [name for name in self.order if name in among]:
            asked = Load(load.requests, load.prompt, load.tokens, compression if name != "plain" else None)
            yield name, client.run(self.urls[name], asked, self.vocabulary, seed)


def contexts(group: Group, sizes: Sizes, seed: int) -> list[dict]:
    """`tokens_per_second` is that of decode, compaction rounds included."""
    rows = []
    for context in sizes.contexts:
        load = Load(sizes.context_requests, context, sizes.interval)
        for name, run in group.ask(load, seed, {"prompt": "compact"}):
            gaps = run.steady_gaps()
            rate = load.requests / statistics.fmean(gaps)
            figures = {**run.firsts(), **spread(gaps), "tokens_per_second": rate, "rounds": run.rounds}
            rows.append({"server": name, "context": context, "requests": load.requests, **figures})
    return rows


def rounds(group: Group, sizes: Sizes, seed: int) -> list[dict]:
    """`worst_at_round_ms` of the plain server is its longest step at the same places."""
    rows = []
    load = Load(sizes.requests, sizes.prompt, sizes.rounds_tokens)
    for name, run in group.ask(load, seed):
        if name == "compressed" and run.rounds != sizes.rounds * sizes.requests:
            raise SystemExit(f"{run.rounds} rounds ran, not {sizes.rounds * sizes.requests}: no figure for them.")
        figures = {**run.firsts(), **spread(run.steady_gaps())}
        figures["worst_at_round_ms"] = 1e3 * worst_at_rounds(run.gaps, sizes)
        rows.append({"server": name, "requests": load.requests, **figures, "rounds": run.rounds})
    return rows


def worst_at_rounds(gaps: list[list[float]], sizes: Sizes) -> float:
    """The longest of the gaps where rounds are due: whenever the private tokens reach budget + interval.

    A step's tokens are sent while the next one is launched, rounds first: the round before token n delays token n - 1.

    Args:
        gaps: for each request, between its tokens. Its prompt is frozen, so token i has i private ones before it.
    """
    due = [sizes.budget + number * sizes.interval - 1 for number in range(1, sizes.rounds + 1)]
    return max(max(own[place - REACH : place + REACH + 1]) for own in gaps for place in due)


def pool(group: Group, sizes: Sizes, seed: int) -> list[dict]:
    """`mean_decoding` requests decoded together on average; `tokens_per_second` is that of the whole."""
    rows = []
    load = Load(sizes.pool_requests, sizes.prompt, sizes.pool_tokens)
    for name, run in group.ask(load, seed):
        gaps = [gap for own in run.gaps for gap in own]
        rates = {
            "mean_decoding": sum(gaps) / run.seconds(),
            "tokens_per_second": load.requests * load.tokens / run.seconds(),
        }
        setting = {"server": name, "pool": sizes.small_pool, "requests": load.requests}
        rows.append({**setting, **run.firsts(), **spread(gaps), **rates, "rounds": run.rounds})
    return rows


def bursts(group: Group, sizes: Sizes, seed: int) -> list[dict]:
    """`longest_over_median` is that of steps while all requests decode."""
    rows = []
    budget, interval = sizes.burst_lengths
    asked = {"budget": budget, "interval": interval, "recent": budget // 4}
    for requests in sizes.bursts:
        for name, run in group.ask(Load(requests, sizes.prompt, sizes.burst_tokens), seed, asked, BURST_SERVERS):
            if (run.rounds > 0) != (name != "plain"):
                raise SystemExit(f"{run.rounds} rounds ran on the server {name}: no figure for them.")
            figures = spread(run.steady_gaps())
            ratio = figures["itl_max_ms"] / figures["itl_p50_ms"]
            rows.append(
                {"server": name, "requests": requests, **figures, "longest_over_median": ratio, "rounds": run.rounds}
            )
    return rows


def overheads(group: Group, sizes: Sizes, seed: int) -> list[dict]:
    """One row for each pair of short runs: the medians of their steps."""
    rows = []
    load = Load(sizes.requests, sizes.prompt, sizes.pair_tokens)
    for number in range(sizes.pairs):
        turned = Group(group.urls, group.order[:: 1 if number % 2 else -1], group.vocabulary)
        steps = {}
        for name, run in turned.ask(load, seed + number):
            if run.rounds:
                raise SystemExit(f"{run.rounds} rounds ran where there should be nothing to evict.")
            steps[name] = 1e3 * statistics.median(run.steady_gaps())
        rows.append({f"{name}_ms": steps[name] for name in SERVERS})
    return rows


def measure(
    model: str, stats: str, sizes: Sizes, only: Collection[str], flags: list[str], repeat: int
) -> dict[str, list[dict]]:
    """Rows by question, from new servers."""
    burst_pool = sizes.burst_pool if "burst" in only else 0
    large, small = (
        ["--max-total-tokens", str(tokens), *flags] for tokens in (max(sizes.pool, burst_pool), sizes.small_pool)
    )
    found = {}
    for args, questions in pairs_of_servers(large, [*small, "--enable-metrics"]):
        asked = {name: ask for name, ask in questions.items() if name.partition(",")[0] in only}
        if asked:
            names = (BURST_SERVERS if "burst" in asked else SERVERS)[:: -1 if repeat % 2 else 1]
            with asked_servers(model, stats, sizes, args, names) as group:
                found |= {name: ask(group, sizes, repeat) for name, ask in asked.items()}
    return found


FIRST = {"context": contexts, "rounds": rounds, "burst": bursts, "overhead": overheads}
SECOND = {"pool": pool, "overhead, with metrics": overheads}
"""What is asked of the servers with the large pool, and of those with the small one, by its name in the results."""


def pairs_of_servers(large: list[str], small: list[str]) -> list[tuple[list[str], dict]]:
    """Flags and questions of each pair; if both pools have the same size, one pair answers all questions."""
    if small == [*large, "--enable-metrics"]:
        return [(large, {**FIRST, "pool": pool})]
    return [(large, FIRST), (small, SECOND)]


@contextmanager
def asked_servers(model: str, stats: str, sizes: Sizes, flags: list[str], order: tuple[str, ...]):
    common = ["--chunked-prefill-size", str(sizes.chunk), "--sleep-on-idle", *flags]
    compressing = ["--enable-triattention", "--triattention-stats", stats]
    compressing += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(sizes.interval)]
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        urls = {}
        for name in order:
            args = [*common, *(compressing if name != "plain" else ())]
            if name not in SERVERS:
                args += ["--triattention-rounds-per-step", "0"]
            running = serving(model, args, folder / f"{name}.log", tokenizer=True)
            urls[name] = stack.enter_context(running).url
        group = Group(urls, order, client.vocabulary_of(model))
        # The first requests of a server take longer than all others.
        for _ in group.ask(Load(sizes.requests, sizes.prompt, 8), 0, among=order):
            pass
        yield group


def medians(repeats: list[list[dict]]) -> list[dict]:
    """The median of each figure over repeats of the same rows, servers in one order."""
    same = {"context", "server", "requests", "pool"}

    def place(row: dict) -> list[int]:
        return [row.get("context", 0), row["requests"], BURST_SERVERS.index(row["server"])]

    repeats = [sorted(rows, key=place) for rows in repeats]
    return [
        {key: row[0][key] if key in same else statistics.median(one[key] for one in row) for key in row[0]}
        for row in zip(*repeats, strict=True)
    ]


def overhead(kind: str, pairs: list[dict]) -> dict:
    """`ratio` is the median over the pairs; half of them lie between `low` and `high`."""
    ratios = [pair["compressed_ms"] / pair["plain_ms"] for pair in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    steps = {f"{name}_ms": statistics.median(pair[f"{name}_ms"] for pair in pairs) for name in SERVERS}
    return {"kind": kind, "pairs": len(pairs), **steps, "ratio": middle, "low": low, "high": high}


def goals(results: dict[str, list[dict]]) -> list[dict]:
    """Ratios and whether they are as small as they should be, for what was measured."""
    ratios = []
    if "context" in results:
        plain, line = ([row["itl_p50_ms"] for row in results["context"] if row["server"] == name] for name in SERVERS)
        ratios.append(("step at the longest context / at the shortest", line[-1] / line[0], MOST_GROWTH))
        ratios.append(("the same, plain", plain[-1] / plain[0], None))
    if "rounds" in results:
        (row,) = (row for row in results["rounds"] if row["server"] == "compressed")
        ratios.append(
            ("longest step at a round / median step", row["worst_at_round_ms"] / row["itl_p50_ms"], MOST_ROUND)
        )
    for row in results.get("burst", ()):
        name = f"{row['requests']} requests together, {row['server']}: longest step / median step"
        ratios.append((name, row["longest_over_median"], None))
    for row in results.get("overhead", ()):
        ratios.append((f"{row['kind']}: compressed step / plain", row["ratio"], MOST_OVERHEAD))
    return [
        {"goal": name, "ratio": ratio, "at_most": most, "met": None if most is None else ratio <= most}
        for name, ratio, most in ratios
    ]


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options, and the servers' flags, which follow `--`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="a tiny random model, short requests, one repeat")
    parser.add_argument("--model", help="by default SmolLM2-135M, as `make model` prepares it")
    parser.add_argument("--stats", help="its statistics; by default measured at launch")
    add_shape(parser)
    parser.add_argument(
        "--random", action="store_true", help="a tiny random model: steps in which host work shows most"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--contexts", type=lambda text: tuple(map(int, text.split(","))), help="lengths of prompts")
    parser.add_argument("--context-requests", type=int, help="requests that decode together after such prompts")
    parser.add_argument("--budget", type=int)
    parser.add_argument("--interval", type=int)
    parser.add_argument("--requests", type=int, help="requests that decode together elsewhere")
    parser.add_argument(
        "--bursts", type=lambda text: tuple(map(int, text.split(","))), help="requests that arrive at once"
    )
    parser.add_argument("--chunk", type=int, help="tokens per chunk of a prefill")
    parser.add_argument("--pool", type=int, help="tokens of the pool of the servers that nothing is short on")
    parser.add_argument("--small-pool", type=int, help="tokens of the pool of the others")
    parser.add_argument("--pool-requests", type=int, help="requests that share it")
    parser.add_argument("--pool-tokens", type=int, help="generated tokens of each of them")
    parser.add_argument("--only", default=list(QUESTIONS), nargs="+", choices=QUESTIONS, help="leave out the others")
    return options_and_flags(parser, argv)


def main(argv: list[str] | None = None) -> None:
    options, flags = parse(sys.argv[1:] if argv is None else argv)
    sizes = sizes_asked(QUICK if options.quick else Sizes(), options)
    if sizes.prompt + sizes.pair_tokens >= sizes.budget + sizes.interval:
        raise SystemExit(f"With a budget of {sizes.budget} and an interval of {sizes.interval} the short runs evict.")
    repeats = []
    if options.model is None and not (options.quick or options.random or options.shape):
        options.model, options.stats = demonstration_model()
    with asked_model(options) as (model, stats):
        for number in range(1 if options.quick else options.repeats):
            repeats.append(measure(model, stats, sizes, options.only, flags, number))
    results = {name: medians([one[name] for one in repeats]) for name in QUESTIONS[:-1] if name in options.only}
    kinds = [name for name in repeats[0] if name.startswith("overhead")]
    if kinds:
        results["overhead"] = [overhead(kind, [pair for one in repeats for pair in one[kind]]) for kind in kinds]
    results["goals"] = goals(results)
    for rows in filter(None, results.values()):
        print_table(list(rows[0]), [list(row.values()) for row in rows])
    setting = {
        "model": model_name(options),
        "flags": flags,
        "threads": threads(),
        **asdict(sizes),
    }
    write({"setting": setting, **results, "repeats": repeats}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
