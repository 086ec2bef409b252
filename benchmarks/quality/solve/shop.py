"""Eight word problems worked out one after another, then a recap of all results, about 290 tokens: task `shop`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from benchmarks.quality.solve.format import Lookup, Problem
from benchmarks.quality.streams.words import words

PROBLEMS, EXAMPLE_PROBLEMS = 8, 4

PEOPLE = {
    "bench": words("Alma Boris Clara Dmitri Elena Felix Greta Hugo Irma Jonas Klara Leo"),
    "held-out": words("Nadia Oskar Paula Quentin Rosa Stefan Tilda Umar Vera Wanda Xenia Yusuf"),
}
ITEMS = {
    "bench": words("pens cups apples stamps candles buttons books marbles"),
    "held-out": words("bricks tiles seeds bulbs planks screws ropes jars"),
}
# How a problem is put, and its two steps as signs.
STORIES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "bench": (
        ("{who} buys {a} boxes with {b} {items} each and gives away {c}. How many {items} are left?", "*", "-"),
        ("{who} has {a} {items}, finds {b} more and sells {c}. How many {items} are left?", "+", "-"),
        ("{who} packs {a} bags with {b} {items} each and adds {c} single ones. How many {items} is that?", "*", "+"),
        ("{who} had {a} {items}, lost {b} and was given {c}. How many {items} is that?", "-", "+"),
    ),
    "held-out": (
        (
            "{who} gets {a} crates of {b} {items}, of which {c} are broken. How many {items} are whole?",
            "*",
            "-",
        ),
        ("In the yard of {who} lie {a} {items}. {b} arrive, {c} are used. How many {items} remain?", "+", "-"),
        ("{who} lays {a} rows of {b} {items} and {c} along the edge. How many {items} are needed?", "*", "+"),
        ("Of {a} {items} {who} takes {b} to a customer and brings {c} back. How many {items} are there?", "-", "+"),
    ),
}
ASKING = {
    "bench": "Solve these problems one by one, each in one line with two steps. In the last line repeat all results.",
    "held-out": "Work out every question in two steps on a line of its own, then sum up all answers in one more line.",
}
RECAP = {"bench": "Results: ", "held-out": "Summary: "}


def _numbers(rng: Random, first: str, second: str) -> tuple[int, int, int]:
    """Three numbers for two steps whose results lie between 1 and 99."""
    while True:
        a, b = (rng.randint(2, 9), rng.randint(3, 9)) if first == "*" else (rng.randint(20, 60), rng.randint(3, 30))
        c = rng.randint(2, 30)
        middle = _step(a, first, b)
        if 0 < middle < 100 and 0 < _step(middle, second, c) < 100:
            return a, b, c


def _step(a: int, sign: str, b: int) -> int:
    steps: dict[str, Callable[[], int]] = {"+": lambda: a + b, "-": lambda: a - b, "*": lambda: a * b}
    return steps[sign]()


def _asked(rng: Random, form: str, count: int) -> tuple[str, list[str]]:
    """A list of problems, and the right text."""
    asked, solved, recap = [ASKING[form]], [], []
    for number, who in enumerate(rng.sample(PEOPLE[form], count), 1):
        # The example shows every kind.
        story, first, second = STORIES[form][number - 1] if count == EXAMPLE_PROBLEMS else rng.choice(STORIES[form])
        a, b, c = _numbers(rng, first, second)
        middle = _step(a, first, b)
        result = _step(middle, second, c)
        asked.append(f"{number}. " + story.format(who=who, a=a, b=b, c=c, items=rng.choice(ITEMS[form])))
        solved.append(f"{number}. {who}: first {a} {first} {b} = {middle}, then {middle} {second} {c} = {result}")
        recap.append(f"{who} {result}")
    return "\n".join(asked), [*solved, RECAP[form] + ", ".join(recap)]


def shop(rng: Random, form: str, name: str) -> Problem:
    example, shown = _asked(rng, form, EXAMPLE_PROBLEMS)
    asked, lines = _asked(rng, form, PROBLEMS)
    messages = (
        {"role": "user", "content": example},
        {"role": "assistant", "content": "\n".join(shown)},
        {"role": "user", "content": asked},
    )
    lookups = tuple(Lookup(PROBLEMS, 2 + 2 * number, number) for number in range(PROBLEMS))
    return Problem(name, "shop", messages, lines[-1], tuple(lines), lookups, "\n".join(lines))
