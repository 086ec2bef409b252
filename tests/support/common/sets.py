"""The sets of tests: what `make test` leaves to `make test-all`, and the parts of that, of which CI runs one."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

# So many that CI takes less than half an hour.
PARTS = 6


def part_of(tests: list, part: int) -> list:
    """Every sixth test, from number `part` on."""
    return tests[part::PARTS]


def wide(*values: Any, id: str | None = None):
    """A case of `pytest.mark.parametrize` that `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.wide, id=id)


def shown(value: object) -> str | None:
    """The id of a case's value that is a dict of settings; pytest names the others."""
    return "-".join(map(str, value.values())) if isinstance(value, dict) else None


def matrix(*axes: list, strength: int = 2) -> list:
    """All combinations of the axes' values as cases, wide but for a few.

    Those few hold every combination of values of any `strength` axes: with 1 each value, with 2 each pair of values.
    They are chosen greedily, of the best the one with the least used values, then the first in the order of the
    product, so that they are always the same.
    """
    cases = list(itertools.product(*map(range, map(len, axes))))
    groups = list(itertools.combinations(range(len(axes)), strength))

    def held(case: tuple[int, ...]) -> set:
        return {(group, tuple(case[axis] for axis in group)) for group in groups}

    missing = set().union(*map(held, cases))
    chosen: set[tuple[int, ...]] = set()
    while missing:
        uses = Counter(place for case in chosen for place in enumerate(case))
        best = max(cases, key=lambda case: (len(held(case) & missing), -sum(uses[place] for place in enumerate(case))))
        chosen.add(best)
        missing -= held(best)
    values = [tuple(axis[place] for axis, place in zip(axes, case, strict=True)) for case in cases]
    return [pytest.param(*each) if case in chosen else wide(*each) for case, each in zip(cases, values, strict=True)]
