"""Streams that log a changing state: counters (task `state`) and a depth-first search (task `dfs`).

`dfs` follows the test with which the paper's authors show what eviction does to a search: its log says what was popped
and pushed, and the questions need the search's state at some point of the log.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from random import Random

from benchmarks.quality.streams.draft import Draft, Order
from benchmarks.quality.streams.format import Question
from benchmarks.quality.streams.words import WORDS

COUNTERS = 12
VALUES = range(10, 100)
# How often a counter is set. With more values than this, small models take any of them for the last.
UPDATES = (1, 2)
PARENTS, STEPS = 8, 4
# How much of the stack is asked for.
TOP = 3

STATE_PROMPTS = {
    "bench": """\
You watch a machine with twelve counters, each of which has a one-word name. The log says what its workers do. \
Whenever one of them sets a counter, the line has the name of the counter and its new value. The value before does not \
matter any more from then on. Some counters are set early and some late; they keep the last value that was logged for \
them, however much else the workers do. When the log ends you will be asked for the current value of several \
counters. To answer, find the last line that names the counter, and copy the value from it. Do not add values up, do \
not average them, and never take the value of another counter or of an earlier line. The log of the machine begins here.
""",
    "held-out": """\
A brewery keeps a diary. An entry has the time of day and what somebody did; some of them looked at a tank, and say \
how many litres it held at that moment. Entries come in the order of the day; a tank that nobody looks at again keeps \
its level. Later on the cellar master asks how full some of the tanks are. The right reply is always the \
most recent entry for that tank, no matter how long ago it was made, and never one of the entries before. Levels are \
given in whole litres, without any calculation. These are the entries of the day.
""",
}
STATE_ASKING = {
    "bench": "Question: What is the value of counter {name} now?\nAnswer: counter {name} set to",
    "held-out": "Cellar master: How full is tank {name} now?\nReply: when last seen, tank {name} held",
}
EVENTS = {
    "bench": (
        "waits for the next shift",
        "cleans the filters and reports no damage",
        "asks for more oil in the main gearbox",
        "moves a pallet of spare parts to the gate",
        "sees nothing unusual in the cooling room",
        "restarts the conveyor after a short stop",
        "writes a note for the night shift",
        "checks the belts, which run quietly",
    ),
    "held-out": (
        "swept the yard before the guests came",
        "tasted the new batch and found it rather bitter",
        "mended a hoop on one of the old barrels",
        "fed the horses and closed the stable",
        "talked to the farmer about this year's barley",
        "opened the windows of the malting floor",
        "carried wood to the boiler room",
        "went to lunch and came back late",
    ),
}
WORKERS = {"bench": ("north", "south", "east", "west"), "held-out": ("the cooper", "the brewer", "the carter")}
DFS_PROMPTS = {
    "bench": """\
This is the log of a depth-first search over a random graph. The search keeps a stack of nodes. In every step it pops \
the node on top of the stack, looks at the neighbours of that node, and pushes those that it has not seen before, one \
line for each; so the neighbour that is named last is on top afterwards and is popped next. If nothing is pushed, the \
next step pops what is left on top from earlier steps. When the stack is empty, the search goes on from a new root. At \
the end you will be asked whose neighbour a node is, which node was popped in a step, and about the stack.
""",
    "held-out": """\
A courier explores unknown towns and keeps a pile of cards, one card for each town that is still to be visited. On \
each trip the courier takes the uppermost card and travels to that town. Towns in reach that never had a card get one, \
and the new cards are laid on the pile in the order in which the report tells of them, the last one uppermost. The \
town from which a card was laid is called the origin of that card. If there are no new towns, the next card comes from \
what is still on the pile; if there is no card at all, the courier begins anew somewhere. Questions about origins, \
trips and the pile follow the report.
""",
}
DFS_LINES = {
    "bench": (
        "step {i}: pop {node} from the stack",
        "push {new}, which is a neighbour of {node}",
        "step {i}: new root {node}",
    ),
    "held-out": (
        "Trip {i} goes to {node}.",
        "A card for {new} is laid; its origin is {node}.",
        "Trip {i} begins anew at {node}.",
    ),
}
DFS_ASKING = {
    "bench": (
        "Question: Whose neighbour is {node}?\nAnswer: push {node}, which is a neighbour of",
        "Question: Which node was popped in step {i}?\nAnswer: step {i}: pop",
        "Question: What does the stack hold now, from the top down?\nAnswer: The stack holds",
        "Question: Which node will be popped next?\nAnswer: The next step will pop",
    ),
    "held-out": (
        "Q: What is the origin of the card for {node}?\nA: A card for {node} is laid; its origin is",
        "Q: Where did trip {i} lead?\nA: Trip {i} goes to",
        "Q: Which cards are on the pile, from the uppermost down?\nA: On the pile are",
        "Q: Where does the next trip lead?\nA: The next trip leads to",
    ),
}


def state(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` log lines, some of which set one of twelve counters; the last values are asked for."""
    count = max(order.units, 3 * COUNTERS)
    names = rng.sample(WORDS[order.form].things, COUNTERS)
    # Last values are spread over all but the first lines, which leaves room for earlier values.
    first = count // 6
    last = {first + int((i + 0.5) / COUNTERS * (count - first)): name for i, name in enumerate(names)}
    finals = dict(zip(names, rng.sample(VALUES, COUNTERS), strict=True))
    reported = {line: (name, finals[name]) for line, name in last.items()}
    for line, name in last.items():
        free = [other for other in range(line) if other not in reported]
        for earlier in rng.sample(free, rng.choice(UPDATES) - 1):
            reported[earlier] = (name, rng.choice([value for value in VALUES if value != finals[name]]))
    private, at, minute = "", {}, rng.randrange(60)
    for line in range(count):
        name, value = reported.get(line, (None, 0))
        at[name] = len(private)
        minute += rng.randrange(1, 5)
        private += _state_line(rng, order.form, minute, name, value)
    questions = [
        Question("state", STATE_ASKING[order.form].format(name=name), f" {finals[name]}", at[name]) for name in names
    ]
    rng.shuffle(questions)
    return Draft(STATE_PROMPTS[order.form], private, tuple(questions))


def _state_line(rng: Random, form: str, minute: int, name: str | None, value: int) -> str:
    """A line that sets a counter or, without a name, reports something else."""
    who, event = rng.choice(WORKERS[form]), rng.choice(EVENTS[form])
    if form == "bench":
        return f"worker {who} {event}\n" if name is None else f"worker {who} is done: counter {name} set to {value}\n"
    done = event if name is None else f"saw that tank {name} held {value} litres"
    return f"{minute // 60 % 24:02}:{minute % 60:02} {who} {done}\n"


def dfs(rng: Random, order: Order) -> Draft:
    """A stream of about `order.units` steps of a search, cut where there is a stack to ask about."""
    count = max(order.units, PARENTS + STEPS)
    popping, pushing, root = DFS_LINES[order.form]
    names = _node_names(rng, order.form)
    private, step = "", 0
    stack: list[str] = []
    # With the character at which each line begins: node and step; child and parent.
    popped: list[tuple[int, int, str]] = []
    pushed: list[tuple[int, str, str]] = []
    while step < count or not stack:
        step += 1
        if stack:
            node, line = stack.pop(), popping
            popped.append((len(private), step, node))
        else:
            node, line = next(names), root
        private += line.format(i=step, node=node) + "\n"
        # A short stack grows and a long one shrinks.
        new = [next(names) for _ in range(rng.choice((0, 1, 2, 3) if len(stack) < 4 else (0, 0, 0, 2)))]
        stack += new
        for child in new:
            pushed.append((len(private), child, node))
            private += pushing.format(new=child, node=node) + "\n"
    return Draft(DFS_PROMPTS[order.form], private, _dfs_questions(rng, order.form, popped, pushed, stack[::-1]))


def _dfs_questions(rng: Random, form: str, popped: list, pushed: list, stack: list[str]) -> tuple[Question, ...]:
    parent_of, popped_in, holds, next_pop = DFS_ASKING[form]
    questions = [
        Question("dfs", parent_of.format(node=child), f" {parent}", at)
        for at, child, parent in _spread(rng, pushed, PARENTS)
    ]
    questions += [
        Question("dfs", popped_in.format(i=step), f" {node}", at) for at, step, node in _spread(rng, popped, STEPS)
    ]
    pushed_at = {child: at for at, child, _ in pushed}
    questions.append(Question("dfs", next_pop, f" {stack[0]}", pushed_at[stack[0]]))
    # No single line holds the answer.
    questions.append(Question("dfs", holds, " " + ", ".join(stack[:TOP])))
    rng.shuffle(questions)
    return tuple(questions)


def _spread(rng: Random, items: list, count: int) -> list:
    """One item at random from each of `count` equal parts."""
    edges = [len(items) * i // count for i in range(count + 1)]
    return [items[rng.randrange(low, max(high, low + 1))] for low, high in pairwise(edges)]


def _node_names(rng: Random, form: str) -> Iterator[str]:
    """Names of two syllables, without repeats."""
    pairs = [(vowel, consonant) for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    syllables = ["".join(pair if form == "bench" else reversed(pair)) for pair in pairs]
    names = [(one + two).capitalize() for one in syllables for two in syllables]
    yield from rng.sample(names, len(names))
