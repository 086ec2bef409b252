"""Whether SGLang has what this package hooks, imports and replaces: the rows of `sglang-triattn doctor` on SGLang.

Nothing is applied here. Hooks are compared as a launch compares them (`hook.check_target`). What else `patches` uses
of SGLang is read from its source, so no list can go stale.
"""

from __future__ import annotations

import ast
import pkgutil
from collections.abc import Iterator
from pathlib import Path

from sglang_triattn.doctor.rows import OK, Row
from sglang_triattn.errors import first_line
from sglang_triattn.patches.doctor.hook_list import WITHOUT, all_hooks
from sglang_triattn.patches.hooks.hook import MISSING, TargetError, check_target

FOLDER = Path(__file__).parents[1]

# What a file replaces without importing it.
NOT_IMPORTED = {"plugin.py": {"sglang.srt.entrypoints.engine.Engine.server_args_class"}}


def hook_rows() -> Iterator[Row]:
    """A row for each hook target, with what needs it."""
    for process, hooks in all_hooks().items():
        for hook in hooks:
            name = hook.target.removeprefix("sglang.srt.")
            try:
                check_target(hook)
                yield Row(name, OK, f"({', '.join(hook.expected)})")
            except TargetError as error:
                yield Row(name, error.status, error.found, f"{WITHOUT[process]}; the hook {hook.why}")


def use_rows() -> Iterator[Row]:
    """A row for each file of `patches` that uses SGLang at run time, with the names that SGLang lacks."""
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = names_used(tree) | NOT_IMPORTED.get(path.relative_to(FOLDER).as_posix(), set())
        if not names:
            continue
        file = f"patches/{path.relative_to(FOLDER)}"
        lacking = [f"{name} ({why})" for name in sorted(names) if (why := _why_missing(name))]
        if lacking:
            purpose = (ast.get_docstring(tree) or "").split("\n")[0].rstrip(".")
            yield Row(file, MISSING, "; ".join(lacking), f"what this file is for fails ({purpose})")
        else:
            yield Row(file, OK, f"{len(names)} name{'s' * (len(names) > 1)} of SGLang")


def names_used(tree: ast.Module) -> set[str]:
    """Dotted names of SGLang that a file imports at run time, and the attributes of these that it reads or replaces."""
    nodes = list(_at_run_time(tree))
    bound = {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "sglang":
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            bound |= {alias.name: alias.name for alias in node.names if alias.name == "sglang"}
    attributes = {
        f"{bound[node.value.id]}.{node.attr}"
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in bound
    }
    return {*bound.values(), *attributes}


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that only the type checker sees."""
    yield node
    checked = isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    for child in () if checked else ast.iter_child_nodes(node):
        yield from _at_run_time(child)


def _why_missing(name: str) -> str | None:
    """Why SGLang has no usable `name`; None if it has."""
    try:
        pkgutil.resolve_name(name)
    except Exception as error:
        return f"{type(error).__name__}: {first_line(error)}"
    return None
