"""`sglang-triattn doctor`: what is right and wrong with this installation."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from sglang_triattn.model.sizes import MODEL_HELP

if TYPE_CHECKING:
    from sglang_triattn.doctor.rows import Row

FAULTY = 1
# Columns of the table where there is no terminal to fill.
WIDTH = 160

PARSER = {
    "help": "say what is right and wrong with this installation",
    "description": "Looks at versions, plugins, GPUs, kernels, kept statistics, and at everything in the installed "
    "SGLang that this package hooks or uses. Exits with 1 if something is wrong. Starts no server.",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        "--model-path",
        metavar="MODEL",
        help=f"also look at what is there for this model: {MODEL_HELP}",
    )
    parser.add_argument("--all", action="store_true", help="also print what is right; --json always does")
    parser.add_argument("--json", action="store_true", help="print the answer as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the answer and returns the exit status. Raises TriAttentionError for a user error."""
    from sglang_triattn.doctor.rows import NOTE, collect

    found: dict[str, list[Row]] = {}
    with _quiet():
        for part, look in _parts(arguments.model):
            found[part] = list(collect(part, look))
    rows = [row for part in found.values() for row in part]
    faults = sum(row.is_fault for row in rows)
    if arguments.json:
        print(json.dumps({"ok": not faults, "rows": list(_plain(found))}, indent=1))
    else:
        _print_tables(found, everything=arguments.all)
        notes = sum(row.status == NOTE for row in rows)
        more = "" if arguments.all else "; --all prints every row"
        print(f"{_counted(len(rows), 'row')}: {_counted(faults, 'fault')}, {_counted(notes, 'note')}{more}")
    return FAULTY if faults else 0


def _counted(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'s' * (number != 1)}"


def _parts(model: str | None) -> Iterator[tuple[str, Callable[[], Iterable[Row]]]]:
    """Each part of the answer, and what looks at it."""
    from sglang_triattn.doctor import machine, packages, statistics

    if model is not None:
        # First: it may be a mistake of the user.
        yield f"Model {model}", lambda: statistics.model_rows(model)
    yield "Versions", packages.version_rows
    yield "Loading by SGLang", packages.loading_rows
    yield "GPUs", machine.gpu_rows
    yield "Kernels", machine.kernel_rows
    yield "Kept statistics", statistics.cache_rows
    yield "SGLang's functions that are hooked", _hook_rows
    yield "Other names of SGLang in use", _use_rows


# `patches` imports SGLang: it is imported only to look at it.
def _hook_rows() -> Iterable[Row]:
    from sglang_triattn.patches.doctor.upstream_check import hook_rows

    return hook_rows()


def _use_rows() -> Iterable[Row]:
    from sglang_triattn.patches.doctor.upstream_check import use_rows

    return use_rows()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps what SGLang logs and prints while it is imported out of the answer."""
    logging.disable(logging.CRITICAL)
    try:
        with redirect_stdout(sys.stderr), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _plain(found: dict[str, list[Row]]) -> Iterator[dict[str, str]]:
    for part, rows in found.items():
        for row in rows:
            fields = {"part": part, "name": row.name, "status": row.status, "found": row.found}
            yield fields | ({"consequence": row.consequence} if row.is_fault else {})


def _print_tables(found: dict[str, list[Row]], *, everything: bool) -> None:
    """Prints a table of each part; without `everything`, only of its faults and notes, if it has any."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from sglang_triattn.doctor.rows import NOTE, OK

    console = Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)
    for part, looked_at in found.items():
        rows = [row for row in looked_at if everything or row.status != OK]
        if not rows:
            continue
        table = Table(box=SIMPLE, show_header=False, title=Text(part), title_justify="left", title_style="bold")
        for row in rows:
            style = "bold red" if row.is_fault else "yellow" if row.status == NOTE else "green"
            text = row.found + (f"\n→ {row.consequence}" if row.is_fault else "")
            table.add_row(Text(row.name, overflow="fold"), Text(row.status, style=style), Text(text, overflow="fold"))
        console.print(table)
