"""Problems made from a seed, by task; the form `held-out` has other words and other ways of saying the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random

from benchmarks.quality.solve.format import Problem
from benchmarks.quality.solve.long import search, states, table
from benchmarks.quality.solve.programs import chain, programs
from benchmarks.quality.solve.shop import shop

TASKS: dict[str, Callable[[Random, str, str], Problem]] = {
    "programs": programs,
    "shop": shop,
    "chain": chain,
    "states": states,
    "table": table,
    "search": search,
}
DEFAULT_TASKS = {"programs": 12, "shop": 12, "chain": 2, "states": 2, "table": 2, "search": 2}


def make_problems(form: str, seed: int, tasks: Mapping[str, int]) -> list[Problem]:
    """`tasks` says how many of each.

    A problem depends on form, seed, task and number only. The first of every task come first, so that what a run has
    done when it is stopped is spread over the tasks.
    """
    made = []
    for number in range(max(tasks.values())):
        for task in (task for task, count in tasks.items() if number < count):
            name = f"{form}-{task}-{seed}-{number}"
            made.append(TASKS[task](Random(name), form, name))
    return made
