"""Plants small faults in the product and says which tests catch them.

python tools/mutate.py draw --seed 1 --count 20                 lists them
python tools/mutate.py run --seed 1 --count 20 --json FILE      runs tests against each, in a clone of this checkout

`run` runs, of the tests that `make test-for` would choose for the mutated file, those of tests/unit, tests/property,
tests/gpu under Triton's interpreter and tests/server, one stage after another, until a test fails. With --json it goes
on where an earlier run of the same seed and count ended, and adds stages that it left out.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkout import ROOT
from env import fail
from import_graph import Checkout
from mutant_stages import STAGES, Clone, files_of
from mutations import Mutation, draw

# For `benchmarks.common`, which writes results.
sys.path.append(str(ROOT))
SURVIVED = "survived"


def run_mutation(clone: Clone, checkout: Checkout, mutation: Mutation, stages: list[str]) -> dict:
    """Runs stages, "NAME" or "NAME, wide", until one catches the mutation: {"stages", "caught_by", "seconds"}."""
    files = files_of(checkout, mutation.file)
    began, ran, caught = time.monotonic(), [], ""
    for stage in stages:
        name, _, wide = stage.partition(", ")
        caught = clone.run_stage(name, files[name], wide or "not wide", mutation)
        ran.append(stage)
        if caught:
            break
    return {"stages": ran, "caught_by": caught or SURVIVED, "seconds": round(time.monotonic() - began, 1)}


def earlier_rows(path: Path | None, mutations: list[Mutation]) -> dict[int, dict]:
    """Rows of an earlier run by number, if its mutations are these."""
    if path is None or not path.exists():
        return {}
    rows = {row["number"]: row for row in json.loads(path.read_text())["rows"]}
    for number, row in rows.items():
        if number > len(mutations) or any(
            row[name] != value for name, value in described(mutations[number - 1]).items()
        ):
            fail(f"{path} holds other mutations than this seed draws now: name a new file, or remove it.")
    return rows


def described(mutation: Mutation) -> dict:
    return {name: getattr(mutation, name) for name in ("file", "line", "kind", "before", "after")}


def run(arguments: argparse.Namespace) -> None:
    # Leaves neither tests nor the clone when it is ended.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    mutations = draw(ROOT, arguments.seed, arguments.count)
    rows = earlier_rows(arguments.json, mutations)
    checkout = Checkout(ROOT)
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-mutants-") as folder:
        clone = Clone(ROOT, Path(folder) / "checkout", arguments.limit)
        for number in arguments.only or range(1, len(mutations) + 1):
            mutation, old = mutations[number - 1], rows.get(number, {})
            print(f"{number}. {mutation}", flush=True)
            wanted = [*arguments.stages, *(f"{stage}, wide" for stage in arguments.stages if arguments.wide)]
            stages = [stage for stage in wanted if stage not in old.get("stages", ())]
            if old.get("caught_by", SURVIVED) == SURVIVED and stages:
                new = run_mutation(clone, checkout, mutation, stages)
                new["stages"] = [*old.get("stages", ()), *new["stages"]]
                new["seconds"] = round(new["seconds"] + old.get("seconds", 0), 1)
                rows[number] = {"number": number, **described(mutation), **new}
                save(arguments, rows)
            print(f"   {rows[number]['caught_by']}, {rows[number]['seconds']} s", flush=True)
    save(arguments, rows)
    survivors = [row for row in rows.values() if row["caught_by"] == SURVIVED]
    print(f"{len(rows)} mutations, {len(survivors)} survived: {[row['number'] for row in survivors]}")


def save(arguments: argparse.Namespace, rows: dict[int, dict]) -> None:
    """Writes what is known so far, as the benchmarks do."""
    if arguments.json:
        from benchmarks import common

        commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        content = {"commit": commit, "seed": arguments.seed, "count": arguments.count}
        common.write({**content, "rows": [rows[number] for number in sorted(rows)]}, str(arguments.json), quick=False)


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def stage_names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(STAGES):
        raise argparse.ArgumentTypeError(f"no stage {', '.join(sorted(unknown))}; there are {', '.join(STAGES)}")
    return [stage for stage in STAGES if stage in names]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description="Plant small faults in the product.", allow_abbrev=False)
    commands = result.add_subparsers(required=True, dest="command")
    for name, what in (("draw", "list mutations"), ("run", "run tests against mutations")):
        command = commands.add_parser(name, help=what, allow_abbrev=False)
        command.add_argument("--seed", type=int, default=1, help="what is drawn follows from it (%(default)s)")
        command.add_argument("--count", type=int, default=20, help="how many (%(default)s)")
    command = commands.choices["run"]
    command.add_argument("--only", type=numbers, metavar="N,...", help="numbers of the list")
    command.add_argument("--stages", type=stage_names, default=[*STAGES], metavar="NAME,...", help=", ".join(STAGES))
    command.add_argument("--wide", action="store_true", help="what survives also meets the tests marked wide")
    command.add_argument("--limit", type=float, default=1800, metavar="SECONDS", help="of one stage (%(default)s)")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the rows here, and go on from what it holds")
    return result


def main() -> None:
    arguments = parser().parse_args()
    if arguments.command == "draw":
        for number, mutation in enumerate(draw(ROOT, arguments.seed, arguments.count), 1):
            print(f"{number:3}. {mutation}")
        return
    if wrong := [number for number in arguments.only or () if not 0 < number <= arguments.count]:
        fail(f"--only names {wrong[0]}, but the mutations have the numbers 1 to {arguments.count}.")
    run(arguments)


if __name__ == "__main__":
    main()
