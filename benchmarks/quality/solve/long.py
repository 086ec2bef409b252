"""Longer texts, 1,000 to 3,000 tokens, each line of which needs what earlier ones say.

    states  the log of a state machine that counts how often it entered each state
    table   a table filled row by row, one column of which copies from a row far above
    search  a depth-first search written out, then the order of its nodes

What is searched, read and copied from stands in the prompt.
"""

from __future__ import annotations

from random import Random

from benchmarks.quality.solve.format import Lookup, Problem
from benchmarks.quality.streams.words import words

STEPS, ROWS, NODES = 70, 90, 40
WRAP = 50
"""A cell of the table is a sum modulo this."""
STATES = {"bench": words("red blue green amber"), "held-out": words("north south east west")}
SYMBOLS = {"bench": words("a b c"), "held-out": words("x y z")}
PLACES = {
    "bench": words(
        """ant bee cat cow crow deer dog duck eel elk emu fly fox frog goat gull hare hawk hen jay kite lamb lark lion
        lynx mole moth mouse newt owl ox pig puma rat ray seal shrew swan toad wolf"""
    ),
    "held-out": words(
        """Aden Baku Bern Bonn Cali Cebu Cork Doha Faro Gent Graz Hull Ipoh Jena Kiel Kobe Kyiv Lima Linz Lodz Lyon
        Male Metz Nara Nice Oran Oslo Oulu Pisa Pune Quito Riga Rome Suva Toyo Turin Ulm Vigo Wien York"""
    ),
}


_Case = tuple[str, list[str], list[Lookup]]
"""A question, the right lines, and their look-ups."""


def _written(task: str, name: str, example: _Case, case: _Case) -> Problem:
    (asked, shown, _), (question, lines, lookups) = example, case
    messages = (
        {"role": "user", "content": asked},
        {"role": "assistant", "content": "\n".join(shown)},
        {"role": "user", "content": question},
    )
    return Problem(name, task, messages, lines[-1], tuple(lines), tuple(lookups), "\n".join(lines))


def states(rng: Random, form: str, name: str) -> Problem:
    return _written("states", name, _machine(rng, form, 6), _machine(rng, form, STEPS))


def _machine(rng: Random, form: str, steps: int) -> _Case:
    names, symbols = STATES[form], SYMBOLS[form]
    rules = {
        (state, symbol): rng.choice([other for other in names if other != state])
        for state in names
        for symbol in symbols
    }
    read = [rng.choice(symbols) for _ in range(steps)]
    asked = {
        "bench": "Run this state machine and count how often it entered each state.",
        "held-out": "A robot turns by these rules. Keep a log, with the number of times that it faced each direction.",
    }[form]
    text = [asked, *(f"{state} reads {symbol}: {target}" for (state, symbol), target in rules.items())]
    text += [f"start: {names[0]}", "input: " + " ".join(read)]
    state, lines, lookups = names[0], [], []
    counts, seen = dict.fromkeys(names, 0), {}
    for step, symbol in enumerate(read):
        target = rules[state, symbol]
        before = counts[target]
        counts[target] += 1
        lines.append(f"{step + 1}: {state} reads {symbol}, to {target}, entered {before} + 1 = {before + 1}")
        if step:
            lookups.append(Lookup(step, 1, step - 1, 5))
        if target in seen:
            lookups.append(Lookup(step, 7, seen[target]))
        state, seen[target] = target, step
    recap = [f"{one} {counts[one]}" for one in names]
    lines.append("entered: " + ", ".join(recap))
    lookups += [Lookup(steps, 2 + 2 * place, seen[one]) for place, one in enumerate(names) if one in seen]
    return "\n".join(text), lines, lookups


def table(rng: Random, form: str, name: str) -> Problem:
    return _written("table", name, _filled(rng, form, 6), _filled(rng, form, ROWS))


def _filled(rng: Random, form: str, rows: int) -> _Case:
    asked, row = {
        "bench": (
            f"Fill the table. Left is the sum of the row above, right the sum of the row that the list names, and the "
            f"sum is left plus right, minus {WRAP} if that is {WRAP} or more.",
            "row",
        ),
        "held-out": (
            f"Each day a shop sends what yesterday left over, and what was left over on a day that the list names; "
            f"together they are today's, less {WRAP} if there are {WRAP} or more. Write all days.",
            "day",
        ),
    }[form]
    sums = [rng.randint(5, WRAP - 1)]
    lines, lookups, named = [f"{row} 1: sum {sums[0]}"], [], []
    for number in range(1, rows):
        source = rng.randrange(number)
        named.append(f"{row} {number + 1}: {source + 1}")
        left, right = sums[-1], sums[source]
        sums.append((left + right) % WRAP)
        lines.append(f"{row} {number + 1}: left {left}, right {right}, sum {sums[-1]}")
        lookups += [Lookup(number, 3, number - 1), Lookup(number, 5, source)]
    return "\n".join([asked, f"{row} 1: sum {sums[0]}", "list:", *named]), lines, lookups


def search(rng: Random, form: str, name: str) -> Problem:
    return _written("search", name, _walk(rng, form, 6), _walk(rng, form, NODES))


def _walk(rng: Random, form: str, nodes: int) -> _Case:
    names = rng.sample(PLACES[form], nodes)
    edges: dict[str, list[str]] = {name: [] for name in names}
    for number in range(1, nodes):
        # Mostly to one of the newest, so that the search goes deep.
        _join(edges, names[number], names[rng.randrange(max(0, number - 4), number)])
    for _ in range(nodes // 4):
        _join(edges, *rng.sample(names, 2))
    asked = {
        "bench": "Search this graph depth first. Go to the first neighbour that is new; if there is none, go back.",
        "held-out": "Visit all towns: take the first road to a town that is new, else return to where you came from.",
    }[form]
    text = [asked, *(f"{name}: {' '.join(edges[name])}" for name in names), f"start: {names[0]}"]
    # Of every node found: the line that says from where it was entered.
    lines, lookups, path, found = [], [], [names[0]], {names[0]: -1}
    while path:
        here = path[-1]
        new = next((other for other in edges[here] if other not in found), None)
        if new is not None:
            found[new] = len(lines)
            path.append(new)
            lines.append(f"{len(lines) + 1}: {here} to {new}, depth {len(path)}")
            continue
        path.pop()
        if path:
            lookups.append(Lookup(len(lines), 6, found[here], 1))
            lines.append(f"{len(lines) + 1}: {here} has none, back to {path[-1]}, depth {len(path)}")
    lookups += [Lookup(len(lines), 2 + place, found[one], 3) for place, one in enumerate(list(found)[1:])]
    lines.append("order: " + " ".join(found))
    return "\n".join(text), lines, lookups


def _join(edges: dict[str, list[str]], a: str, b: str) -> None:
    if b not in edges[a]:
        edges[a].append(b)
        edges[b].append(a)
