"""Streams that log a changing state: counters (task `state`) and a depth-first search (task `dfs`).

`dfs` follows the test by which the paper's authors show what eviction does to a search: its log says what was popped
and pushed, and the questions need the search's state at some point of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count as count_up
from itertools import pairwise
from random import Random
from string import ascii_uppercase

from quality_draft import Draft, Order
from quality_format import Question
from quality_words import WORDS

COUNTERS = 12
# Others that are logged to the end, so that the counters asked for fall silent one after another.
BACKGROUND = 8
PARENTS, STEPS = 8, 4
# The stack that is asked for as a whole.
STACK = range(3, 6)

STATE_PROMPTS = {
    "bench": """\
You watch a machine with twenty counters, each of which has a one-word name. Whenever a counter changes, one line is \
added to the log: its name, an equals sign, and the new value. The value before does not matter any more from then on. \
Some counters change often and some stop changing early; those that have stopped keep the last value that was logged \
for them. When the log ends you will be asked for the current value of several counters. To answer, find the last line \
that names the counter, and copy the value from it. Do not add values up, do not average them, and never take the \
value of another counter or of an earlier line. The log of the machine begins here.
""",
    "held-out": """\
A brewery writes down the level of its tanks. Every entry has the time of day, the name of a tank and how many litres \
it holds at that moment. Entries come in the order in which the tanks were looked at; a tank that nobody looks at \
again keeps its level. Later on the cellar master asks how full some of the tanks are. The right reply is always the \
most recent entry for that tank, no matter how long ago it was made, and never one of the entries before. Levels are \
given in whole litres, without any calculation. These are the entries of the day.
""",
}
STATE_ASKING = {
    "bench": "Question: What is the current value of {name}?\nAnswer: {name} =",
    "held-out": "Cellar master: How full is tank {name} now?\nReply: tank {name} holds",
}
DFS_PROMPTS = {
    "bench": """\
This is the log of a depth-first search over a random graph. The search keeps a stack of nodes. In every step it pops \
the node on top of the stack, looks at the neighbours of that node, and pushes those that it has not seen before, in \
the order in which the line names them; so the neighbour that is named last is on top afterwards and is popped next. \
The node that was popped when another one was pushed is called the parent of that one. If nothing is pushed, the next \
step pops what is left on top from earlier steps. When the stack is empty, the search goes on from a new root. At the \
end you will be asked about parents, about the order of the steps, and about the stack.
""",
    "held-out": """\
A courier explores unknown towns and keeps a pile of cards, one card for each town that is still to be visited. On \
each trip the courier takes the uppermost card and travels to that town. Towns in reach that never had a card get one, \
and the new cards are laid on the pile in the order in which the report lists them, the last one uppermost. The town \
from which a card was laid is called the origin of that card. If there are no new towns, the next card comes from what \
is still on the pile; if there is no card at all, a fresh one is drawn. Questions about origins, trips and the pile \
follow the report.
""",
}
DFS_LINES = {
    "bench": ("step {i}: pop {node}; push {new}", "step {i}: pop {node}; nothing to push", "step {i}: new root {node}"),
    "held-out": ("Trip {i} to {node}, new cards: {new}", "Trip {i} to {node}, no card", "Trip {i}: drew {node}"),
}
DFS_ASKING = {
    "bench": (
        "Question: What is the parent of {node}?\nAnswer: {node} was pushed when the search popped",
        "Question: Which node was popped in step {i}?\nAnswer: step {i}: pop",
        "Question: What does the stack hold now, from top to bottom?\nAnswer: The stack holds",
        "Question: Which node will be popped next?\nAnswer: The next step will pop",
    ),
    "held-out": (
        "Q: Where was the card of {node} laid?\nA: The card of {node} was laid in",
        "Q: Where did trip {i} lead?\nA: Trip {i} to",
        "Q: Which cards are on the pile, from the uppermost down?\nA: On the pile are",
        "Q: Where does the next trip lead?\nA: The next trip leads to",
    ),
}


def state(rng: Random, order: Order) -> Draft:
    """A stream of `order.units` log lines about twenty counters, and the last values of twelve."""
    count = max(order.units, 3 * COUNTERS)
    names = rng.sample(WORDS[order.form].things, COUNTERS + BACKGROUND)
    asked = names[:COUNTERS]
    # Evenly over all but the first lines, so that a counter has several values before its last.
    first = count // 6
    last = {first + int((i + 0.5) / COUNTERS * (count - first)): name for i, name in enumerate(asked)}
    falls_silent = {name: line for line, name in last.items()}
    finals = dict(zip(asked, rng.sample(range(100, 1000), COUNTERS), strict=True))
    private, at, minute = "", {}, rng.randrange(60)
    for line in range(count):
        alive = [name for name in names if falls_silent.get(name, count) > line]
        name = last.get(line) or rng.choice(alive)
        value = finals[name] if line in last else rng.choice([v for v in range(100, 1000) if v != finals.get(name)])
        at[name] = len(private)
        minute += rng.randrange(1, 5)
        private += _state_line(order.form, line, minute, name, value)
    questions = [
        Question("state", STATE_ASKING[order.form].format(name=name), f" {finals[name]}", at[name]) for name in asked
    ]
    rng.shuffle(questions)
    return Draft(STATE_PROMPTS[order.form], private, tuple(questions))


def _state_line(form: str, line: int, minute: int, name: str, value: int) -> str:
    if form == "bench":
        return f"{name} = {value}\n"
    return f"{minute // 60 % 24:02}:{minute % 60:02} tank {name} holds {value} litres\n"


def dfs(rng: Random, order: Order) -> Draft:
    """A stream of about `order.units` steps of a search, cut where the stack is short enough to be asked for."""
    count = max(order.units, PARENTS + STEPS)
    pushing, idle, root = DFS_LINES[order.form]
    names = _node_names(rng, order.form)
    private, step = "", 0
    stack: list[str] = []
    # With the character at which their line begins: node and step, and child and parent.
    popped: list[tuple[int, int, str]] = []
    pushed: list[tuple[int, str, str]] = []
    while step < count or len(stack) not in STACK:
        step, start = step + 1, len(private)
        if not stack:
            stack.append(next(names))
            private += root.format(i=step, node=stack[0]) + "\n"
            continue
        node = stack.pop()
        # A short stack grows and a long one shrinks, so that the end is never far.
        new = [next(names) for _ in range(rng.choice((0, 1, 2, 3) if len(stack) < 4 else (0, 0, 1, 2)))]
        stack += new
        popped.append((start, step, node))
        pushed += [(start, child, node) for child in new]
        private += (pushing if new else idle).format(i=step, node=node, new=", ".join(new)) + "\n"
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
    # Its answer is in no single line.
    questions.append(Question("dfs", holds, " " + ", ".join(stack)))
    rng.shuffle(questions)
    return tuple(questions)


def _spread(rng: Random, items: list, count: int) -> list:
    """One at random of each of `count` equal parts."""
    edges = [len(items) * i // count for i in range(count + 1)]
    return [items[rng.randrange(low, max(high, low + 1))] for low, high in pairwise(edges)]


def _node_names(rng: Random, form: str) -> Iterator[str]:
    """Names of a few letters and digits, none twice."""
    if form == "bench":
        for tens in count_up():
            yield from rng.sample([f"{letter}{10 * tens + n}" for letter in ascii_uppercase for n in range(10)], 260)
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    towns = [(one + two).capitalize() for one in syllables for two in syllables]
    yield from rng.sample(towns, len(towns))
