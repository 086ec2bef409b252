"""What does decode cost on this GPU, dense and compressed?

One decode loop in the shape of a real model with random weights: paged KV in SGLang's layout, FlashInfer's batch decode
planned every step (this folder's Triton kernel where it is absent), a CUDA graph for each batch size, and this
package's own scorer, remap and mover, which run real rounds between the steps, on the same stream, every `interval`
tokens of a request. Requests are staggered so that rounds spread over the steps; one table also has them together, as
without levelling when all arrived together, and level, as in a server. Dense and compressed runs alternate; figures are
medians. K and V lie in one pool that both use.

A ceiling is the tokens per second at which weights and KV entries alone would be read at this device's copy bandwidth.
No figure is reported unless the answers are right, see check.py. Needs torch, Triton and numpy.

    python -m benchmarks.decode --json decode.json
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence

import torch

from benchmarks.common import print_table, write
from benchmarks.decode.attention import KINDS, choose
from benchmarks.decode.bench import DEFAULT, Bench, Setting
from benchmarks.decode.model import SHAPES
from benchmarks.decode.rounds import scoring_share, time_arrangements, time_rounds
from benchmarks.decode.tables import Errors, capacity, goal_rows, goals, grid

QUICK = 16
"""Factor by which lengths and memories are smaller in a quick run."""

QUICK_LAYERS = 2


def setting_of(arguments: argparse.Namespace) -> Setting:
    """Raises SystemExit if the options cannot be measured together."""
    shape = SHAPES[arguments.model or ("Qwen3-8B" if arguments.device == "cuda" else "Toy")]
    scale = QUICK if arguments.quick else 1
    layers = arguments.layers or (min(shape.layers, QUICK_LAYERS) if arguments.quick else shape.layers)
    if not 1 <= layers <= shape.layers:
        raise SystemExit(f"--layers is {layers}, but {shape.name} has {shape.layers}: give 1 to {shape.layers}.")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("There is no CUDA device here: use a machine with a GPU, or --device cpu for a toy run.")
    contexts, budgets = ([n // scale for n in given] for given in (arguments.contexts, arguments.budgets))
    interval = arguments.interval // scale
    if min(*budgets, interval) < 2 or min(arguments.batches) < 1 or min(contexts) < 2 * interval + 8:
        raise SystemExit(
            f"Contexts of {min(contexts)} tokens, budgets of {min(budgets)} and an interval of {interval} are too "
            "small to measure: give larger --contexts, --budgets and --interval, and batches of at least 1."
        )
    # A toy model holds as many tokens as the model that it stands for.
    tokens = [memory * 1e9 / SHAPES["Qwen3-8B"].kv_bytes(SHAPES["Qwen3-8B"].layers) for memory in arguments.memories]
    memories = [memory * 1e9 for memory in arguments.memories]
    if shape.name == "Toy":
        memories = [count * shape.kv_bytes(shape.layers) for count in tokens]
    return Setting(
        shape=shape,
        layers=layers,
        batches=arguments.batches,
        contexts=contexts,
        budgets=budgets,
        interval=interval,
        memories=[memory / scale for memory in memories],
        repeats=arguments.repeats or (1 if arguments.quick else 3),
        device=arguments.device,
        scale=scale,
        pool=arguments.pool and arguments.pool * 1e9,
    )


def show(rows: list[dict]) -> None:
    """Prints a table; missing figures are dashes."""
    shown = [["-" if value is None else value for value in row.values()] for row in rows]
    for header, _ in itertools.groupby(rows, key=lambda row: tuple(row)):
        print_table(header, shown)
    sys.stdout.flush()


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decode", description="Decode, dense and compressed: tokens per second and rounds."
    )
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", choices=SHAPES, help="shape (Qwen3-8B on a GPU, Toy elsewhere)")
    parser.add_argument("--layers", type=int, help="layers to run (all of the model's)")
    parser.add_argument("--attention", choices=("auto", *KINDS), default="auto", help="what attends (%(default)s)")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64], metavar="N")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 8192, 16384, 32768], metavar="TOKENS")
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 2048, 4096], metavar="TOKENS")
    parser.add_argument("--interval", type=int, default=128, metavar="TOKENS", help="of rounds (%(default)s)")
    parser.add_argument("--memories", type=float, nargs="*", default=[16.0, 40.0], metavar="GB", help="fixed KV memory")
    parser.add_argument("--pool", type=float, metavar="GB", help="most KV memory to take (what is free)")
    parser.add_argument("--repeats", type=int, help="runs of each measurement (3; 1 with --quick)")
    parser.add_argument("--quick", action="store_true", help="2 layers, lengths a sixteenth; less than a minute")
    return parser.parse_args(argv)


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    setting = setting_of(arguments)
    kind = choose(arguments.attention, setting.shape, setting.device)
    bench, errors = Bench(setting, kind), Errors()
    slots = bench.pool.slots(setting.layers)
    about = {
        "model": setting.shape.name,
        "layers": setting.layers,
        "attention": kind.name,
        "interval": setting.interval,
        "selection": DEFAULT.selection,
        "copy_gb_s": bench.bandwidth / 1e9,
        "weights_gb": setting.shape.held_bytes(setting.layers) / 1e9,
        "kv_pool_gb": slots * setting.shape.kv_bytes(setting.layers) / 1e9,
        "kv_pool_tokens": slots,
    }
    show([about])
    results = {"setting": about, "complete": False, "rows": [], "goal_rows": [], "capacity": [], "goals": []}

    def keep(part: str, rows: list[dict]) -> None:
        """Shows and writes what is known so far, so that a run that is cut short keeps its figures."""
        show(rows)
        results[part] = results.get(part, []) + rows
        results["setting"] = about | {"largest_error": errors.largest}
        write(results, arguments.json, arguments.quick)

    for requests in setting.batches:
        keep("rows", grid(bench, errors, requests))
    results["scoring"] = scoring_share(bench)
    keep("rounds", time_rounds(bench))
    for requests in setting.batches:
        keep("arrangements", time_arrangements(bench, requests))
    # The goals are for full lengths.
    if setting.scale == 1:
        keep("goal_rows", goal_rows(bench, errors, results["rows"]))
        keep("goals", goals(bench, results["rows"], results["goal_rows"], results["scoring"]["share"]))
    for memory in setting.memories:
        keep("capacity", capacity(bench, errors, memory))
    results["complete"] = True
    keep("rows", [])
    print(f"Answers checked; the largest relative error is {errors.largest:.4f}.")
