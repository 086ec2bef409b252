"""Small faults of the product's code, drawn by a seed: one place each, changed as a slip of the hand would change it.

Nothing that cannot change what the code does is drawn: docstrings, annotations, log and error texts, `__all__`, blocks
for type checkers, arguments whose order means nothing.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from import_graph import LINKS, PRODUCT, is_for_type_checkers

KINDS = ("sign", "bound", "swapped arguments", "missing call", "negated condition", "dropped argument")
# What a round reads and decides.
HEAVY = (
    *("sglang_triattn/rounds/", "sglang_triattn/request/", "sglang_triattn/stats/"),
    *("kernels/select/", "kernels/score/"),
    *("patches/rounds/", "patches/scheduler/", "patches/request/", "patches/ranks/", "patches/model/"),
)
WEIGHT = 4
# What commands print; classes for the type checker alone.
LEFT_OUT = ("sglang_triattn/cli/", "sglang_triattn/data/", "patches/sglang_types.py")

SIGNS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv}
BOUNDS = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
# Called for what they write, not for what they change; an argument's place means nothing, or is an error at once.
TALK = {"debug", "info", "warning", "error", "exception", "critical", "log", "print", "warn", "write_line"}
SYMMETRIC = {"max", "min", "maximum", "minimum", "gcd", "lcm", "isclose", "allclose", "equal", "isinstance", "zip"}


@dataclass(frozen=True)
class Mutation:
    """
    Attributes:
        file: as seen from the checkout.
        line: the first one that changes, counted from 1.
        kind: one of KINDS.
        start: offset of the changed text in the file's UTF-8 bytes.
        end: offset of what follows it.
        before: the text that is replaced.
        after: what replaces it.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line}  {self.kind}: {before}  ->  {after}"

    def apply(self, root: Path) -> None:
        """Changes the file below `root`."""
        source = (root / self.file).read_bytes()
        if source[self.start : self.end].decode() != self.before:
            raise ValueError(f"{self.file} is not the file that the mutation was drawn from")
        (root / self.file).write_bytes(source[: self.start] + self.after.encode() + source[self.end :])


def called(node: ast.AST) -> str:
    """The last part of a called function's name; empty for anything else."""
    if not isinstance(node, ast.Call):
        return ""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def idle(node: ast.AST) -> bool:
    """Whether nothing below this node can change what the code does, but for texts."""
    match node:
        case ast.Raise() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Expr(value=call) if called(call) in TALK:
            return True
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            return True
    return is_for_type_checkers(node)


def live_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Every node that can change what the code does."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not idle(child):
                yield child
                yield from live_nodes(child)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """(kind, the part of `node` that is replaced, new text) of each mutation here."""
    match node:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in SIGNS and not _is_text(left):
            yield "sign", node, ast.unparse(ast.BinOp(left, SIGNS[type(op)](), right))
        case ast.AugAssign(target=target, op=op, value=value) if type(op) in SIGNS and not _is_text(value):
            yield "sign", node, ast.unparse(ast.AugAssign(target, SIGNS[type(op)](), value))
        case ast.Compare(left=left, ops=[op], comparators=others) if type(op) in BOUNDS:
            yield "bound", node, ast.unparse(ast.Compare(left, [BOUNDS[type(op)]()], others))
        case ast.Constant(value=int(number)) if not isinstance(number, bool):
            yield "bound", node, str(number + 1)
        case ast.Slice(lower=lower, upper=upper):
            for part in (lower, upper):
                if part is not None and not isinstance(part, ast.Constant):
                    yield "bound", part, ast.unparse(ast.BinOp(part, ast.Add(), ast.Constant(1)))
        case ast.Expr(value=ast.Call()):
            yield "missing call", node, "pass"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            yield "negated condition", test, negated(test)
        case ast.comprehension(ifs=tests):
            for test in tests:
                yield "negated condition", test, negated(test)
    if isinstance(node, ast.Call):
        yield from changed_arguments(node)


def changed_arguments(call: ast.Call) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
    """As `changes`, of a call's positional arguments."""
    count = len(call.args)
    if any(isinstance(each, ast.Starred | ast.GeneratorExp) for each in call.args):
        return
    if called(call) in ("max", "min") and isinstance(call.func, ast.Name) and count >= 2:
        for place in range(count):
            left = [*call.args[:place], *call.args[place + 1 :]]
            text = ast.unparse(ast.Call(call.func, left, call.keywords) if count > 2 else left[0])
            yield "dropped argument", call, text if count > 2 else f"({text})"
    if called(call) in SYMMETRIC | TALK:
        return
    for place in range(count - 1):
        one, other = call.args[place : place + 2]
        if ast.unparse(one) != ast.unparse(other):
            swapped = [*call.args[:place], other, one, *call.args[place + 2 :]]
            yield "swapped arguments", call, ast.unparse(ast.Call(call.func, swapped, call.keywords))


def negated(test: ast.expr) -> str:
    """A condition's opposite; in brackets, because it may stand in a longer expression."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return f"({ast.unparse(test.operand)})"
    return f"(not {ast.unparse(ast.UnaryOp(ast.Not(), test)).removeprefix('not ')})"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def mutations_of(root: Path, file: str) -> list[Mutation]:
    """Every mutation of one file, in the order of its syntax tree."""
    source = (root / file).read_bytes()
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line))

    def offset(line: int | None, column: int | None) -> int:
        return lines[(line or 1) - 1] + (column or 0)

    found = []
    for node in live_nodes(ast.parse(source)):
        for kind, part, after in changes(node):
            start = offset(part.lineno, part.col_offset)
            end = offset(part.end_lineno, part.end_col_offset)
            found.append(Mutation(file, part.lineno, kind, start, end, source[start:end].decode(), after))
    return found


def is_change(root: Path, mutation: Mutation) -> bool:
    """Whether the mutated file still parses, and to something else."""
    source = (root / mutation.file).read_bytes()
    try:
        mutant = ast.parse(source[: mutation.start] + mutation.after.encode() + source[mutation.end :])
    except SyntaxError:
        return False
    return ast.dump(mutant) != ast.dump(ast.parse(source))


def product_files(root: Path) -> list[str]:
    """Files of the product that mutations are drawn from, in order."""
    paths = (path.relative_to(root) for folder in PRODUCT for path in (root / folder).rglob("*.py"))
    return sorted(str(path) for path in paths if path.parts[:2] not in LINKS and not str(path).startswith(LEFT_OUT))


def weight(file: str) -> int:
    return WEIGHT if file.startswith(HEAVY) else 1


def draw(root: Path, seed: int, count: int) -> list[Mutation]:
    """`count` different mutations: first a kind, each as likely as the others, then a place.

    The same seed draws the same from the same files, and a larger count begins with what a smaller one draws.

    Raises:
        ValueError: there are fewer.
    """
    pool: dict[str, list[Mutation]] = {kind: [] for kind in KINDS}
    for file in product_files(root):
        for mutation in mutations_of(root, file):
            pool[mutation.kind].append(mutation)
    chance, drawn = random.Random(seed), []
    while len(drawn) < count:
        kinds = [kind for kind in KINDS if pool[kind]]
        if not kinds:
            raise ValueError(f"there are only {len(drawn)} mutations to draw from")
        found = pool[chance.choice(kinds)]
        place = chance.choices(range(len(found)), [weight(mutation.file) for mutation in found])[0]
        mutation = found.pop(place)
        if is_change(root, mutation):
            drawn.append(mutation)
    return drawn
