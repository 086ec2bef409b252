"""The cells that the quality benchmark fills in, one for each choice at each budget, and their units of answers."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.quality.choices import Choice
from sglang_triattn.config import Config


@dataclass(frozen=True)
class Cell:
    """One choice at one budget."""

    share: float
    choice: Choice

    def config(self, private: int, interval: int | None) -> Config:
        """The cell's settings for a stream of `private` tokens."""
        return self.choice.config(max(1, round(self.share * private)), interval)


@dataclass(frozen=True)
class Unit:
    """What an interval draws as one: a question, or a block of scored text. Sums over its `count` answers."""

    right: float
    logprob: float
    count: int = 1


Found = dict[Cell, dict[str, list[Unit]]]
"""Cell -> task -> units, for one stream."""
