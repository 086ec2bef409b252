"""Does a model still solve a problem once what it wrote itself is evicted?

Problems whose answers can be checked are solved greedily, with everything kept and with less (`--shares`, parts of the
tokens of the dense text; `--budgets`, tokens). What later lines need stands only in the text that the model itself
wrote:

    python -m benchmarks.quality.solve --model FOLDER --stats FILE --json solve.json
    python -m benchmarks.quality.solve --model FOLDER --tasks programs=13 --policies dense default newest --shares 0.25
    python -m benchmarks.quality.solve --model FOLDER --problems MINE.jsonl --budgets 256,512
    python -m benchmarks.quality.solve --model FOLDER --server http://localhost:30000

Tasks are `programs`, `shop`, and longer ones: `chain`, `states`, `table`, `search`. A problem is solved when its last
line is right; lines at their place and look-ups by distance are counted as well. `format.py` describes files of
problems, `table.py` the rows of the JSON. Policies are those of `benchmarks.quality`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import write
from benchmarks.quality.choices import ChoiceError
from benchmarks.quality.cli import add_policies, say, shares_of, stats_for
from benchmarks.quality.model import load_model, load_tokenizer
from benchmarks.quality.server import AskError
from benchmarks.quality.solve.cells import Cell, cells_of
from benchmarks.quality.solve.chat import Chat
from benchmarks.quality.solve.format import Problem, ProblemError, read_problems, to_line
from benchmarks.quality.solve.grade import grade
from benchmarks.quality.solve.here import Answer, Solver
from benchmarks.quality.solve.make import DEFAULT_TASKS, TASKS, make_problems
from benchmarks.quality.solve.server import ServerSolver
from benchmarks.quality.solve.table import print_rows, rows_of
from benchmarks.quality.streams.words import FORMS
from sglang_triattn.errors import TriAttentionError

SHARES = (0.5, 0.375, 0.25, 0.125)
POLICIES = ("dense", "default", "newest", "random", "value-norm", "per-layer-head", "expected-attention", "r-kv")
QUICK_TASKS = {"programs": 1, "shop": 1}
QUICK_SHARES = (0.25,)
QUICK_POLICIES = ("dense", "default", "newest")
QUICK_TOKENS = 64
INTERVAL = 32
"""Tokens between rounds: short texts would otherwise have one or two."""


def main(argv: Sequence[str] | None = None) -> None:
    options = _options(argv)
    try:
        _run(options)
    except (AskError, ChoiceError, ProblemError, TriAttentionError, OSError) as error:
        raise SystemExit(f"error: {error}") from error


def _run(options: argparse.Namespace) -> None:
    chat = Chat(load_tokenizer(options.model))
    tasks = options.tasks or (QUICK_TASKS if options.quick else DEFAULT_TASKS)
    made = read_problems(options.problems) if options.problems else make_problems(options.form, options.seed, tasks)
    shares = options.shares or (() if options.budgets else QUICK_SHARES if options.quick else SHARES)
    few = () if options.server else QUICK_POLICIES if options.quick else POLICIES
    cells = cells_of(options.policies or few, shares, options.budgets or (), options.base)
    solver, setting = (_server if options.server else _here)(options, chat, cells)
    setting = {
        "model": Path(options.model).name,
        **setting,
        "base": options.base,
        "form": None if options.problems else options.form,
    }
    found: list[tuple[Problem, dict[Cell, Answer]]] = []
    for number, problem in enumerate(made, 1):
        start = time.monotonic()
        found.append((problem, solver.solve(problem, cells)))
        say(f"problem {number} of {len(made)}, {problem.id}: {time.monotonic() - start:.0f} s")
        graded = [{cell: (grade(one, own.text), own.evicted) for cell, own in rows.items()} for one, rows in found]
        rows = rows_of([one.task for one, _ in found], graded, options.base)
        # After each, so that nothing measured is lost.
        done = {**setting, "problems": [one.id for one, _ in found]}
        write({"setting": done, "rows": rows}, options.json, options.quick)
        _keep_text(options.texts, problem, found[-1][1], fresh=number == 1)
    print_rows(rows, options.base)


def _server(options: argparse.Namespace, chat: Chat, cells: Sequence[Cell]) -> tuple[Any, dict]:
    solver = ServerSolver(
        options.server.rstrip("/"), chat, options.interval, _limit(options), lambda line: say(f"  {line}")
    )
    served = {name: value for name, value in solver.settings.items() if name != "stats"}
    return solver, {"measured": "by a server", "interval": options.interval, "server": served}


def _here(options: argparse.Namespace, chat: Chat, cells: Sequence[Cell]) -> tuple[Any, dict]:
    model = load_model(options.model, options.device, options.dtype)
    stats = stats_for(options, model, [cell.choice for cell in cells])
    solver = Solver(
        model, chat, stats, options.interval, _limit(options), options.rows, options.seed,
        lambda line: say(f"  {line}"),
    )  # fmt: skip
    dtype = str(model.dtype).removeprefix("torch.")
    return solver, {"measured": "in the cache for transformers", "interval": options.interval, "dtype": dtype}


def _limit(options: argparse.Namespace) -> int:
    return options.max_tokens or (QUICK_TOKENS if options.quick else 4096)


def _keep_text(path: str | None, problem: Problem, answers: dict[Cell, Answer], fresh: bool) -> None:
    """Appends what every policy wrote, under the problem."""
    if not path:
        return
    with Path(path).open("w" if fresh else "a", encoding="utf-8") as file:
        file.write(to_line(problem) + "\n")
        for cell, answer in answers.items():
            size = cell.budget if cell.share is None else cell.share
            file.write(f"=== {cell.choice.name} {size}, {answer.tokens} tokens\n{answer.text}\n")


def _budgets(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers of tokens, such as 128,256")
    return tuple(map(int, parts))


def _task(text: str) -> tuple[str, int]:
    name, equals, count = text.partition("=")
    if name not in TASKS or not equals or not count.isdecimal() or not int(count):
        raise argparse.ArgumentTypeError(f"{text!r} is not TASK=COUNT with a task of {', '.join(TASKS)}")
    return name, int(count)


class _Tasks(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        setattr(namespace, self.dest, dict(values))


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality.solve", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument("--model", required=True, help="folder or hub name")
    parser.add_argument("--stats", metavar="FILE", help="its statistics; by default those that a server keeps of it")
    parser.add_argument("--problems", metavar="FILE", help="JSONL of problems; by default made from --seed")
    parser.add_argument("--tasks", nargs="+", type=_task, action=_Tasks, metavar="TASK=COUNT", help="of those it makes")
    parser.add_argument("--server", metavar="URL", help="asks this server instead; --model gives the tokenizer")
    parser.add_argument("--shares", type=shares_of, help="budgets as parts of the dense text (0.5,0.375,0.25,0.125)")
    parser.add_argument("--budgets", type=_budgets, help="budgets in tokens; without --shares, instead of shares")
    add_policies(parser)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--texts", metavar="FILE", help="also writes what every policy wrote")
    parser.add_argument("--quick", action="store_true", help="two problems cut short, one share, three policies")
    parser.add_argument("--form", choices=FORMS, default=FORMS[0], help="of the problems that it makes")
    parser.add_argument("--seed", type=int, default=1, help="of the problems that it makes, and of random policies")
    parser.add_argument("--interval", type=int, default=INTERVAL, help=f"tokens between rounds ({INTERVAL})")
    parser.add_argument("--max-tokens", type=int, help="most tokens of a text (4096)")
    parser.add_argument("--rows", type=int, default=8, help="policies side by side (8)")
    parser.add_argument("--device", help="by default cuda if there is one, else cpu")
    parser.add_argument("--dtype", help="by default float32 on the CPU, else the checkpoint's")
    return parser.parse_args(argv)
