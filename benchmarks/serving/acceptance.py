"""How many drafted tokens hold before and after compaction rounds? A model that drafts for itself, on natural text.

Each prompt is a passage that a server continues greedily, plain and compressed. It is asked twice: for the tokens that
come before the first round, and for all. What the second answer has on top are the tokens after rounds. A compressed
answer goes its own way once tokens are evicted, and some texts are easier to foretell than others: figures are sums
over all passages.

    python -m benchmarks.serving.acceptance --json acceptance.json
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import sglang_triattn
from benchmarks.common import print_table, write
from benchmarks.serving.capacity import generate
from benchmarks.serving.servers import VOCABULARY, demonstration_model, prepared_model, serving, threads

TEXT = Path(sglang_triattn.__file__).parent / "data" / "calibration.txt"
STEPS = 3
"""Tokens drafted at each step; one more comes from the model itself."""


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for the number of passages; `before` of an answer come before its first round."""

    passages: int = 8
    prompt: int = 64
    budget: int = 128
    interval: int = 32
    before: int = 144
    tokens: int = 480


QUICK = Sizes(passages=2, prompt=32, budget=32, interval=16, before=32, tokens=120)


def passages(model: str, sizes: Sizes) -> list[list[int]]:
    """Token ids of the prompts: passages of one text, at equal distances."""
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(model)(TEXT.read_text(encoding="utf-8"))["input_ids"]
    step = (len(ids) - sizes.prompt) // sizes.passages
    return [ids[number * step :][: sizes.prompt] for number in range(sizes.passages)]


def random_prompts(sizes: Sizes) -> list[list[int]]:
    """Prompts of random token ids, equal in each run."""
    draw = random.Random(1)
    return [[draw.randrange(3, VOCABULARY) for _ in range(sizes.prompt)] for _ in range(sizes.passages)]


def server_args(draft: str, stats: str | None, sizes: Sizes, more: Sequence[str]) -> list[str]:
    """Flags of a server that drafts, compressed if there are statistics."""
    args = ["--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", draft]
    args += ["--speculative-num-steps", str(STEPS), "--speculative-eagle-topk", "1"]
    args += ["--speculative-num-draft-tokens", str(STEPS + 1)]
    args += ["--max-total-tokens", str(4 * sizes.passages * (sizes.prompt + sizes.tokens))]
    if stats is not None:
        args += ["--enable-triattention", "--triattention-stats", stats]
        args += ["--triattention-budget", str(sizes.budget), "--triattention-interval", str(sizes.interval), *more]
    return args


def answers(url: str, prompts: Sequence[list[int]], tokens: int) -> list[dict]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda ids: generate(url, ids, tokens), prompts))


def measure(url: str, prompts: Sequence[list[int]], sizes: Sizes) -> dict:
    """Tokens that a step takes on, in the answers' first `before` tokens and in the others."""
    found = [answers(url, prompts, tokens) for tokens in (sizes.before, sizes.tokens)]
    steps, tokens = (
        [sum(answer["meta_info"][name] for answer in each) for each in found]
        for name in ("spec_verify_ct", "completion_tokens")
    )
    rounds = [[answer["meta_info"].get("triattention", {}).get("rounds", 0) for answer in each] for each in found]
    if any(rounds[0]) or (any(rounds[1]) and not all(rounds[1])):
        raise SystemExit(f"Rounds came too soon or not at all: {rounds}. Choose other sizes.")
    return {
        "rounds": sum(rounds[1]),
        "tokens_per_step_before": tokens[0] / steps[0],
        "tokens_per_step_after": (tokens[1] - tokens[0]) / (steps[1] - steps[0]),
        "outputs": [answer["output_ids"] for answer in found[1]],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two short passages")
    parser.add_argument("--random", action="store_true", help="a tiny random model and prompts of random token ids")
    parser.add_argument("--model", help="by default SmolLM2-135M, as `make model` prepares it")
    parser.add_argument("--draft", help="the model that drafts; by default the model itself")
    parser.add_argument("--stats", help="the model's statistics; by default measured at launch")
    parser.add_argument("--flags", nargs="+", default=[], help="more flags of the compressed server, without dashes")
    parser.add_argument("--only", choices=("plain", "compressed"), help="leave out the other server")
    for name, value in asdict(Sizes()).items():
        parser.add_argument(f"--{name}", type=int, help=f"by default {value}")
    options = parser.parse_args()
    given = {key: value for key, value in vars(options).items() if value is not None and key in asdict(Sizes())}
    sizes = replace(QUICK if options.quick else Sizes(), **given)
    with ExitStack() as stack, TemporaryDirectory() as logs:
        if options.random:
            model, stats = stack.enter_context(prepared_model(None, None, "Qwen3"))
            prompts = random_prompts(sizes)
        else:
            model, stats = (options.model, options.stats or "auto") if options.model else demonstration_model()
            prompts = passages(model, sizes)
        draft, rows = options.draft or model, []
        for name, source in (("plain", None), ("compressed", stats)):
            if options.only not in (None, name):
                continue
            args = server_args(
                draft, source, sizes, [f"--{flag}" if flag[0].isalpha() else flag for flag in options.flags]
            )
            with serving(model, args, Path(logs) / f"{name}.log") as server:
                rows.append({"server": name, **measure(server.url, prompts, sizes)})
    header = [key for key in rows[0] if key != "outputs"]
    print_table(header, [[row[key] for key in header] for row in rows])
    setting = {"model": Path(model).name, "draft": Path(draft).name, "threads": threads(), **asdict(sizes)}
    write({"setting": setting, "rows": rows}, options.json, options.quick)


if __name__ == "__main__":
    main()
