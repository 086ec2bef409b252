"""The work of one agent in a tool loop: what its tools return, what it thinks, and what it is asked at the end.

Texts are in ChatML, on which SmolLM2 and Qwen2.5 were trained. Every answer is stated once, but for a reading that
changed: its last statement counts.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from benchmarks.quality.streams.words import WORDS, deck, people, sentences

FORM = "held-out"
INPUTS = ("identifier", "state", "instruction")
"""Kinds of questions about what the agent was given; the kind `own` is about what it wrote itself."""
OWN = "own"
READINGS = 4
"""Tanks, one of which each result names."""
SIZES = (0.5, 0.0, 1.0, 0.25, 0.75)
"""Sizes of inputs by turn, from the smallest (0) to the largest (1), from turn 2 on, again and again: turns 2, 7 and 12
bring as much."""
THOUGHTS = (1.0, 0.25, 0.75, 0.0, 0.5)
"""The same for what is thought, from turn 1 on, so that the first turn outgrows a budget soon."""

RULES = """\
You are the agent of a repair shop. In each step you think, and call one tool as a line of JSON; the tool's result is \
the next message. Three rules hold for all that you do. Sign every summary with desk {desk}. Send damaged goods to \
gate {gate}. Never pay out more than {limit} euros at once. When all visitors are known you will be asked about them. \
Copy numbers digit by digit, and never make one up."""
TASK = "Look up these visitors one after another, and note in which drawer you put each case: {names}."
CALL = '<tool_call>\n{{"name": "find_case", "arguments": {{"visitor": "{name}"}}}}\n</tool_call>'
LAST = "All visitors are known now."
NOTE = "I put the case of {name} into drawer {drawer}."


@dataclass(frozen=True)
class Turn:
    """One turn: what comes in, and what the agent is made to write."""

    input: str
    """From the end of the turn before to where the agent begins."""
    thinking: str
    reply: str
    """What follows the thinking, with the end of the message."""


@dataclass(frozen=True)
class Ask:
    """One question after the last turn."""

    kind: str
    turn: int
    """The turn, from 1 on, in which the answer was stated last."""
    text: str
    """From the end of the message before to where the answer begins."""
    answer: str


@dataclass(frozen=True)
class Work:
    turns: tuple[Turn, ...]
    asks: tuple[Ask, ...]


def message(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def level(pattern: tuple[float, ...], turn: int, first: int, bounds: tuple[int, int]) -> int:
    """Tokens of a turn: `pattern` begins at turn `first`, and 0 and 1 in it are the bounds."""
    low, high = bounds
    return round(low + pattern[(turn - first) % len(pattern)] * (high - low))


def made(
    seed: int, turns: int, results: tuple[int, int], thoughts: tuple[int, int], count: Callable[[str], int]
) -> Work:
    """The work of one agent; other seeds give unrelated ones.

    Args:
        turns: at least 2. The first brings rules and task, each later one a tool's result.
        results: fewest and most tokens of a tool's result.
        thoughts: fewest and most tokens of what is thought in a turn.
        count: gives the number of tokens of a text.
    """
    rng = Random(f"tool loop {seed}")
    filler = sentences(Random(f"tool loop filler {seed}"), FORM)
    names = list(itertools.islice(people(rng, FORM), turns - 1))
    numbers = iter(rng.sample(range(10000, 100000), turns - 1))
    drawers = iter(rng.sample(range(1000, 10000), turns))
    readings = iter(rng.sample(range(100, 1000), turns))
    things = deck(rng, rng.sample(WORDS[FORM].things, READINGS))
    rules = {
        "desk": rng.randrange(1000, 10000),
        "gate": rng.choice(WORDS[FORM].secrets),
        "limit": rng.randrange(200, 999),
    }
    made_turns, state, asks = [], {}, list(_rule_asks(rules, names))
    for turn in range(1, turns + 1):
        if turn == 1:
            opening = message("system", RULES.format(**rules)) + message("user", TASK.format(names=", ".join(names)))
        else:
            name, number = names[turn - 2], next(numbers)
            shown = {next(things): next(readings)}
            state |= {thing: (turn, value) for thing, value in shown.items()}
            size = level(SIZES, turn, 2, results)
            opening = "\n" + message("user", _result(name, number, shown, filler, size, count))
            asks.append(_ask("identifier", turn, f"What is the case number of {name}?",
                             f'{{"visitor": "{name}", "case_number":', number))  # fmt: skip
        drawer = next(drawers)
        about = names[max(0, turn - 2)]
        note = NOTE.format(name=about, drawer=drawer)
        if turn % 2 == 0:
            asks.append(_ask(OWN, turn, f"Where did you put the case of {about}?",
                             note.rpartition(" ")[0], drawer))  # fmt: skip
        thinking = _padded(note if turn > 1 else "", filler, level(THOUGHTS, turn, 1, thoughts), count)
        reply = CALL.format(name=names[turn - 1]) if turn < turns else LAST
        made_turns.append(Turn(opening + "<|im_start|>assistant\n", f"<think>\n{thinking}\n</think>\n\n",
                               f"{reply}<|im_end|>"))  # fmt: skip
    for thing, (turn, value) in state.items():
        asks.append(_ask("state", turn, f"How full is tank {thing} now?", f'{{"tanks": {{"{thing}":', value))
    rng.shuffle(asks)
    return Work(tuple(made_turns), tuple(asks))


def _ask(kind: str, turn: int, question: str, opening: str, answer: object) -> Ask:
    return Ask(kind, turn, "\n" + message("user", question) + f"<|im_start|>assistant\n{opening}", f" {answer}")


def _rule_asks(rules: dict, names: list[str]) -> Iterator[Ask]:
    yield _ask("instruction", 1, f"Write the summary for {names[0]}.",
               f"Summary: the case of {names[0]} is known. Signed, desk", rules["desk"])  # fmt: skip
    yield _ask("instruction", 1, "A visitor brings a damaged kettle. Where does it go?", "It goes to gate",
               rules["gate"])  # fmt: skip
    yield _ask("instruction", 1, "How much may be paid out at once?", "Never more than", rules["limit"])


def _result(
    name: str, number: int, readings: dict[str, int], filler: Iterator[str], size: int, count: Callable[[str], int]
) -> str:
    """A tool's result of about `size` tokens: a case number, readings of tanks, and a report that fills it."""
    fields = {"visitor": name, "case_number": number, "tanks": readings}

    def text(report: str) -> str:
        return f"<tool_response>\n{json.dumps({'report': report, **fields})}\n</tool_response>"

    return text(_padded("", filler, size - count(text("")), count))


def _padded(middle: str, filler: Iterator[str], size: int, count: Callable[[str], int]) -> str:
    """Sentences around `middle`, up to `size` tokens, or `middle` alone."""
    before: list[str] = []
    after: list[str] = []
    for sentence in filler:
        side = before if len(before) <= len(after) else after
        side.append(sentence)
        if count(" ".join(filter(None, [*before, middle, *after]))) > size:
            side.pop()
            break
    return " ".join(filter(None, [*before, middle, *after]))
