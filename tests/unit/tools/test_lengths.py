"""The list of SGLang's functions that take lengths or positions, in docs/lengths.md."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path

import pytest

from checkout import ROOT
from documents import DOCS, code, table
from sglang_triattn.patches.doctor.hook_list import all_hooks

ROWS = table(DOCS / "lengths.md", "Functions", "SGLang's function")


def path_of(row: list[str]) -> str:
    """The dotted path of a row's function."""
    (name,) = code(row[0])
    return name if name.startswith("sglang.") else f"sglang.srt.{name}"


def source_of(names: list[str]) -> tuple[ast.Module, list[str]]:
    """The module that a dotted path begins with, read but not imported, and the names that follow."""
    (root,) = importlib.util.find_spec("sglang").submodule_search_locations
    place = Path(root)
    for number, name in enumerate(names[1:], 2):
        place = place / name
        if place.with_suffix(".py").is_file():
            return ast.parse(place.with_suffix(".py").read_text(encoding="utf-8")), names[number:]
    raise AssertionError(f"SGLang has no module of {'.'.join(names)}")


@pytest.mark.parametrize("row", ROWS, ids=lambda row: path_of(row).split(".", 3)[-1])
def test_every_function_exists(row):
    """Prevents a list that speaks of another version of SGLang, or of tests that are gone."""
    node, names = source_of(path_of(row).split("."))
    assert names
    for name in names:
        inside = [each for each in node.body if isinstance(each, (ast.ClassDef, ast.FunctionDef))]
        assert name in [each.name for each in inside]
        node = next(each for each in inside if each.name == name)
    for file in code(row[4]):
        assert (ROOT / file).is_file()


def test_what_is_hooked_there_is_hooked():
    """Prevents a function that the list calls mended and that no hook touches."""
    targets = {hook.target for hooks in all_hooks().values() for hook in hooks}
    hooked = {path_of(row) for row in ROWS if row[3] == "hooked"}
    assert hooked
    assert hooked <= targets
