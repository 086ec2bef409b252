"""Makes streams of a wanted length: a builder is asked for more and more units until the length fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from benchmarks.quality.streams.format import Question, StreamError

# How much shorter than wanted a private text may be: builders add whole units.
SLACK = 0.06
MOST_UNITS = 1 << 20


@dataclass(frozen=True)
class Order:
    """What a builder is asked for."""

    form: str
    number: int
    """Number of the stream among those of its kind."""
    units: int
    """Sentences, log lines, snippets or steps: the more, the longer."""
    tokens: int
    """Approximate number of tokens of the private text."""


@dataclass(frozen=True)
class Draft:
    """A stream without its id."""

    prompt: str
    private: str
    questions: tuple[Question, ...] = ()
    score_last: int | None = None


Builder = Callable[[Random, Order], Draft]


@dataclass(frozen=True)
class Length:
    """How long private texts are: `amount`, in the unit that `count` counts."""

    amount: int
    count: Callable[[str], int]
    """Counts the tokens or characters of a text."""
    tokens: int
    """`amount` in tokens, exact or approximate."""


def fitted(build: Builder, seed: str, form: str, number: int, length: Length) -> Draft:
    """The longest draft that does not exceed `length`; the same for the same arguments.

    Raises:
        StreamError: no draft comes close to that length.
    """

    def draft(units: int) -> Draft:
        return build(Random(seed), Order(form, number, units, length.tokens))

    def fits(units: int) -> bool:
        return length.count(draft(units).private) <= length.amount

    low, high = 1, 2
    while high < MOST_UNITS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    best = draft(low)
    size = length.count(best.private)
    if not (1 - SLACK) * length.amount <= size <= length.amount:
        raise StreamError(
            f"No text of {length.amount} can be made for {seed!r}, the nearest has {size}: ask for another length."
        )
    return best
