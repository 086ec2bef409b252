"""How many drafted tokens hold before and after compaction rounds? A model that drafts for itself (STANDALONE).

Each request is sent twice to a plain and to a compressed server: for the tokens that come before its first round, and
for all. What the second answer has on top are the tokens after rounds. A compressed answer goes its own way once tokens
are evicted, and drafts hold more often in some texts than in others, above all in those that repeat themselves:
`repeated` is the share of runs of eight tokens that the answers had before. Figures are sums over all requests.

    python -m benchmarks.serving.acceptance --json acceptance.json
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.common import print_table, write
from benchmarks.serving.capacity import generate
from benchmarks.serving.servers import VOCABULARY, for_a_server, prepared_model, serving, sizes_asked, threads
from server import exit_on_signals

STEPS = 3
"""Tokens drafted at each step; one more comes from the model itself."""
RUN = 8
ASKED = (
    "Write a long story about a lighthouse keeper and a ship.",
    "Explain step by step how a compiler works.",
    "Write a Python class for a bank account, and tests for it.",
    "Describe the history of the printing press.",
    "Compare three ways to sort a list, with code for each.",
    "Write a letter from a sailor to his sister.",
    "Explain how a refrigerator works to a child.",
    "Write a dialogue of two friends who plan a journey.",
)


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for the number of requests; `before` of an answer come before its first round."""

    requests: int = 8
    prompt: int = 64
    budget: int = 256
    interval: int = 64
    before: int = 256
    tokens: int = 800


QUICK = Sizes(requests=2, prompt=32, budget=64, interval=16, before=64, tokens=240)


def random_prompts(sizes: Sizes) -> list[list[int]]:
    """Prompts of random token ids, the same in each run."""
    draw = random.Random(1)
    return [[draw.randrange(3, VOCABULARY) for _ in range(sizes.prompt)] for _ in range(sizes.requests)]


def chat_prompts(model: str, sizes: Sizes) -> list[list[int]]:
    """Prompts that ask for long answers, by the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    asked = itertools.islice(itertools.cycle(ASKED), sizes.requests)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True)
        for text in asked
    ]
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def server_args(draft: str, stats: str | None, sizes: Sizes) -> list[str]:
    """Flags of a server that drafts, compressed if there are statistics."""
    args = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
    args += ["--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"]
    args += ["--speculative-num-draft-tokens", str(STEPS + 1)]
    args += ["--max-total-tokens", str(4 * sizes.requests * (sizes.prompt + sizes.tokens))]
    if stats is not None:
        args += ["--enable-triattention", "--triattention-stats", stats]
        args += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(sizes.interval)]
    return args


def repeated(answers: Sequence[list[int]]) -> float:
    """Share of the runs of RUN tokens that their answer had before."""
    runs = [[tuple(ids[first : first + RUN]) for first in range(len(ids) - RUN + 1)] for ids in answers]
    return 1 - sum(len(set(each)) for each in runs) / sum(map(len, runs))


def measure(url: str, prompts: Sequence[list[int]], sizes: Sizes) -> dict:
    """Tokens that a step takes on, in the answers' first `before` tokens and in the others."""
    count, lengths = len(prompts), (sizes.before, sizes.tokens)
    with ThreadPoolExecutor(2 * count) as pool:
        asked = [(ids, tokens) for tokens in lengths for ids in prompts]
        facts = list(pool.map(lambda each: generate(url, *each), asked))
    short, long = facts[:count], facts[count:]
    steps, tokens, rounds = (
        [[read(answer["meta_info"]) for answer in part] for part in (short, long)]
        for read in (
            lambda info: info["spec_verify_ct"],
            lambda info: info["completion_tokens"],
            lambda info: info.get("triattention", {}).get("rounds", 0),
        )
    )
    if any(rounds[0]) or any(rounds[1]) != all(rounds[1]):
        raise SystemExit(f"Rounds came too soon or not at all, {rounds}: choose another --before or --tokens.")
    before = sum(tokens[0]) / sum(steps[0])
    after = (sum(tokens[1]) - sum(tokens[0])) / (sum(steps[1]) - sum(steps[0]))
    answers = [answer["output_ids"][sizes.before :] for answer in long]
    return {"rounds": sum(rounds[1]), "before": before, "after": after, "ratio": after / before,
            "repeated": repeated(answers)}  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two requests of a quarter of the lengths")
    parser.add_argument("--model", help="one with a chat template; by default a tiny random model")
    parser.add_argument("--stats", help="its statistics; by default measured at launch")
    parser.add_argument("--draft", help="the model that drafts; by default the same")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, help=f"by default {value}")
    options = parser.parse_args(argv)
    sizes, rows = sizes_asked(QUICK if options.quick else Sizes(), options), []
    model, stats, draft = (name and for_a_server(name) for name in (options.model, options.stats, options.draft))
    with ExitStack() as stack:
        model, stats = stack.enter_context(prepared_model(model, stats, "Qwen3"))
        logs = Path(stack.enter_context(TemporaryDirectory()))
        prompts = chat_prompts(model, sizes) if options.model else random_prompts(sizes)
        for name, source in (("plain", None), ("compressed", stats)):
            args = server_args(draft or model, source, sizes)
            with serving(model, args, logs / f"{name}.log") as server:
                rows.append({"server": name, **measure(server.url, prompts, sizes)})
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    names = [Path(name).name if name else None for name in (options.model, options.draft)]
    setting = {"model": names[0] or "tiny random Qwen3", "draft": names[1] or "the same", "threads": threads()}
    write({"setting": {**setting, **asdict(sizes)}, "rows": rows}, options.json, options.quick)


if __name__ == "__main__":
    exit_on_signals()
    main()
