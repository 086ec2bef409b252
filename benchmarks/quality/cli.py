"""What does a model still know of a text after its KV cache was compressed, and what would cheaper choices leave?

Streams (`benchmarks.quality.streams`) are fed to a model whose KV cache is compacted by the server's default settings,
by each selection, by controls (`policies.py`), and by any settings that are named:

    python -m benchmarks.quality --model FOLDER --stats FILE --json quality.json
    python -m benchmarks.quality --model FOLDER --shares 0.25 --policies default settings:selection=per-head,recent=0.5
    python -m benchmarks.quality --model FOLDER --server http://localhost:30000 --json quality-server.json

A share is the budget relative to the private tokens at the end. Rounds run every 128 tokens, so up to 127 tokens more
are held when the questions come; their number is the same under every policy. A question is right when each token of
its answer is the most likely one, given those before; scored text is right where the most likely token is the dense
model's. `dense` keeps everything, `default` keeps what a server does that was given only the budget.
Questions see K/V that was computed densely, unless --fed; scored text is always fed. `table.py` explains how the
intervals are computed. With --server the same questions go to a live server (`server.py`), whose own settings are the
default.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.quality.cells import Cell, Found
from benchmarks.quality.choices import ALL, DEFAULT, DENSE, USUAL, Choice, ChoiceError, read_choice
from benchmarks.quality.foresight import by_second_reading
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.run import Runner
from benchmarks.quality.server import AskError, ServerRunner
from benchmarks.quality.streams.format import StreamError, read_streams
from benchmarks.quality.streams.make import DEFAULT_STREAMS, FORMS, MIN_TOKENS, length_by_tokenizer, make_streams
from benchmarks.quality.table import print_rows, rows_of
from benchmarks.quality.tokens import Tokens, tokenized
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.stats.cache import load_cached
from sglang_triattn.stats.file import QueryStats, check_stats, load_stats
from sglang_triattn.transformers_cache.cache import shape_of

SHARES = (0.5, 0.25, 0.125)
QUICK_STREAMS = {"mixed": 1, "state": 1, "text": 1}
QUICK_SHARES = (0.5, 0.125)


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    try:
        _run(options)
    except (AskError, ChoiceError, StreamError, TriAttentionError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _run(options: argparse.Namespace) -> None:
    names = options.policies or (() if options.server else USUAL)
    cells = cells_of((options.base, *names), options.shares or (QUICK_SHARES if options.quick else SHARES))
    (_run_by_server if options.server else _run_here)(options, cells)


def _run_by_server(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    runner = ServerRunner(options.server.rstrip("/"), options.interval, options.parallel, lambda line: say(f"  {line}"))
    streams = _streams(options, load_tokenizer(options.model))
    setting = {
        "model": Path(options.model).name,
        "measured": "by a server",
        "chunk": runner.chunk,
        "page_size": runner.page_size,
        "server": {name: value for name, value in runner.settings.items() if name != "stats"},
        "streams": [stream.id for stream in streams],
    }
    _measure(streams, lambda stream: runner.run(stream, cells), setting, options)


def _run_here(options: argparse.Namespace, cells: Sequence[Cell]) -> None:
    model = load_model(options.model, options.device, options.dtype)
    tokenizer = load_tokenizer(options.model)
    streams = _streams(options, tokenizer)
    stats = stats_for(options, model, [cell.choice for cell in cells])
    runner = Runner(
        model, stats, options.interval, options.rows, options.fed, options.seed, lambda line: say(f"  {line}"),
        second_reading=lambda ids: by_second_reading(model, tokenizer, ids),
    )  # fmt: skip
    setting = {
        "model": Path(options.model).name,
        "measured": "each row fed" if options.fed else "questions on dense K/V, text fed",
        "interval": cells[-1].config(64, options.interval).interval,
        "dtype": str(model.dtype).removeprefix("torch."),
        "streams": [stream.id for stream in streams],
    }
    _measure(streams, lambda stream: runner.run(stream, cells), setting, options)


def _measure(
    streams: Sequence[Tokens], measure: Callable[[Tokens], Found], setting: dict, options: argparse.Namespace
) -> None:
    """Runs all streams; writes the JSON after each, so that nothing measured is lost."""
    found: list[Found] = []
    for number, stream in enumerate(streams, 1):
        start = time.monotonic()
        found.append(measure(stream))
        say(f"stream {number} of {len(streams)}, {stream.id}: {time.monotonic() - start:.0f} s")
        rows = rows_of(found, options.base)
        done = {**setting, "base": options.base, "streams": setting["streams"][:number]}
        write({"setting": done, "rows": rows}, options.json, options.quick)
    print_rows(rows, options.base)


def cells_of(names: Sequence[str], shares: Sequence[float]) -> list[Cell]:
    """Every choice at every share, and dense.

    Raises:
        ChoiceError: a name stands for no choice.
    """
    choices: dict[str, Choice] = {name: read_choice(name) for name in dict.fromkeys((DENSE, *names))}
    return [Cell(share, choice) for share in shares for choice in choices.values()]


def _streams(options: argparse.Namespace, tokenizer: Any) -> list[Tokens]:
    """The streams of the file, or else those that the benchmark makes."""
    if options.streams:
        made = read_streams(options.streams)
    else:
        length = length_by_tokenizer(tokenizer, options.tokens or (MIN_TOKENS if options.quick else 2 * MIN_TOKENS))
        kinds = QUICK_STREAMS if options.quick else DEFAULT_STREAMS
        made = make_streams(options.form, options.seed, kinds, length)
    return [tokenized(stream, tokenizer) for stream in made]


def stats_for(options: argparse.Namespace, model: Any, choices: Iterable[Choice]) -> QueryStats | None:
    """The statistics that `--stats` names, or else those that a server keeps of the model; None if no choice needs any.

    Raises:
        ChoiceError: a choice needs look-up weights, and the statistics have none.
        TriAttentionError: there are none, or they do not fit.
    """
    choices = list(choices)
    if not any(choice.scores or choice.looks_up for choice in choices):
        return None
    shape = shape_of(model)
    found = check_stats(load_stats(options.stats), shape) if options.stats else load_cached(shape)
    if found is None:
        raise TriAttentionError(
            f"No statistics of {options.model} are kept here: make them by `sglang-triattn calibrate` and name the "
            "file by --stats."
        )
    wanting = [choice.name for choice in choices if choice.looks_up]
    if wanting and found.lookups is None:
        raise ChoiceError(
            f"{wanting[0]} needs look-up weights: name statistics made by `sglang-triattn calibrate --look-ups`."
        )
    return found


def say(line: str) -> None:
    """Progress, which is none of the results."""
    print(line, file=sys.stderr, flush=True)


def shares_of(text: str) -> tuple[float, ...]:
    """A list of shares, as an option gives it."""
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not shares or not all(0 < share <= 1 for share in shares):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0 and up to 1, such as 0.5,0.25")
    return shares


def add_policies(parser: argparse.ArgumentParser) -> None:
    """The options that name policies; `read_choice` reads their values."""
    parser.add_argument("--policies", nargs="+", metavar="NAME", help=f"of {', '.join(ALL)}, settings:FIELD=VALUE,...")
    parser.add_argument(
        "--base", default=DEFAULT, metavar="NAME", help="the policy that intervals compare with (default)"
    )


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--stats", metavar="FILE", help="its statistics; by default those that a server keeps of it")
    parser.add_argument("--streams", metavar="FILE", help="of benchmarks.quality.streams; by default made from --seed")
    parser.add_argument("--server", metavar="URL", help="asks this server instead; --model gives the tokenizer")
    parser.add_argument("--shares", type=shares_of, help="budgets as parts of the private tokens (0.5,0.25,0.125)")
    add_policies(parser)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="three short streams, two shares")
    parser.add_argument("--fed", action="store_true", help="every row computes its own K/V, as in a server; slower")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="of the streams that it makes")
    parser.add_argument("--tokens", type=int, help=f"private tokens of the streams that it makes ({2 * MIN_TOKENS})")
    parser.add_argument("--seed", type=int, default=1, help="of the streams that it makes, and of random policies")
    parser.add_argument("--interval", type=int, help="tokens between rounds (the server's)")
    parser.add_argument("--rows", type=int, default=8, help="policies side by side (8)")
    parser.add_argument("--parallel", type=int, default=1, help="requests at once (1); more share the server's chunks")
    parser.add_argument("--device", help="by default cuda if there is one, else cpu")
    parser.add_argument("--dtype", help="by default float32 on the CPU, else the checkpoint's")
    return parser.parse_args(argv)
