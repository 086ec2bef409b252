"""Rows and tables of `solve`, and how sure its differences are: intervals of a bootstrap over the problems.

Both policies are compared on the same draw of problems; 2.5 % of the draws lie below `low`, 2.5 % above `high`. If all
differences are equal, an interval has no width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.common import print_table
from benchmarks.quality.cells import Unit
from benchmarks.quality.choices import DEFAULT
from benchmarks.quality.solve.cells import Cell
from benchmarks.quality.solve.grade import REACHES, Grade, reach_name
from benchmarks.quality.table import difference

Graded = Mapping[Cell, tuple[Grade, int]]
"""Of one problem: each cell's grade, and the tokens that its rounds evicted."""


def rows_of(tasks: Sequence[str], graded: Sequence[Graded], base: str = DEFAULT) -> list[dict]:
    """One row per task, size and policy, from the task and the grades of each problem.

    Keys: task, share, budget, policy; problems; right: problems whose last line is right; lines, of: lines right at
    their place, of how many; lookups: distance in lines -> [right, attempted]; evicted: mean tokens per problem; low,
    high: 95 % interval of the share of right problems, policy minus `base`; lines_low, lines_high: of right lines.
    """
    rows = []
    for task in dict.fromkeys(tasks):
        own = [one for name, one in zip(tasks, graded, strict=True) if name == task]
        for cell in own[0]:
            compared = next(
                other
                for other in own[0]
                if other.choice.name == base and (other.share, other.budget) == (cell.share, cell.budget)
            )
            rows.append({"task": task, **_row(cell, [one[cell] for one in own], [one[compared][0] for one in own])})
    return rows


def _row(cell: Cell, found: Sequence[tuple[Grade, int]], base: Sequence[Grade]) -> dict:
    grades = [grade for grade, _ in found]
    low, high = _interval([(float(one.right), 1) for one in grades], [(float(one.right), 1) for one in base])
    with_lines = [(a, b) for a, b in zip(grades, base, strict=True) if a.of]
    lines_low, lines_high = (
        _interval([(float(a.lines), a.of) for a, _ in with_lines], [(float(b.lines), b.of) for _, b in with_lines])
        if with_lines
        else (0.0, 0.0)
    )
    lookups = {}
    for reach in REACHES:
        hits, tries = (sum(one.lookups[reach][part] for one in grades) for part in (0, 1))
        if tries:
            lookups[reach_name(reach)] = [hits, tries]
    return {
        "share": cell.share,
        "budget": cell.budget,
        "policy": cell.choice.name,
        "problems": len(grades),
        "right": sum(one.right for one in grades),
        "lines": sum(one.lines for one in grades),
        "of": sum(one.of for one in grades),
        "lookups": lookups,
        "evicted": sum(count for _, count in found) / len(found),
        "low": low,
        "high": high,
        "lines_low": lines_low,
        "lines_high": lines_high,
    }


def _interval(own: Sequence[tuple[float, int]], base: Sequence[tuple[float, int]]) -> tuple[float, float]:
    units = [[Unit(right, 0.0, count) for right, count in side] for side in (own, base)]
    return difference([units[0]], [units[1]])


def print_rows(rows: Sequence[dict], base: str = DEFAULT) -> None:
    """Prints a table per size: right answers and lines by policy and task, and what surely differs from `base`."""
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    for size in dict.fromkeys((row["share"], row["budget"]) for row in rows):
        own = [row for row in rows if (row["share"], row["budget"]) == size]
        kept = f"{size[0]:.4g} of the dense text's tokens" if size[1] is None else f"{size[1]} tokens"
        print(f"keeping {kept}; + and - mark what is surely above or below {base}: problems, then lines")
        lines = []
        for policy in dict.fromkeys(row["policy"] for row in own):
            cells = {row["task"]: row for row in own if row["policy"] == policy}
            lines.append([policy, *(_cell(cells[task]) for task in tasks)])
        print_table(["policy", *tasks], lines)


def _cell(row: dict) -> str:
    def mark(low: float, high: float) -> str:
        return "+" if low > 0 else "-" if high < 0 else " "

    right = f"{row['right']}/{row['problems']}{mark(row['low'], row['high'])}"
    if not row["of"]:
        return right
    return f"{right} {row['lines']}/{row['of']}{mark(row['lines_low'], row['lines_high'])}"
