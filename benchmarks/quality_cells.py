"""What the quality benchmark fills in: a cell for each choice at each budget, with units of answers."""

from __future__ import annotations

from dataclasses import dataclass

from quality_choices import Choice
from sglang_triattn.config import Config


@dataclass(frozen=True)
class Cell:
    """One choice at one budget."""

    share: float
    choice: Choice

    def config(self, private: int, interval: int | None) -> Config:
        """Its settings for a stream of `private` tokens."""
        return self.choice.config(max(1, round(self.share * private)), interval)


@dataclass(frozen=True)
class Unit:
    """What is drawn as one for an interval: a question, or a block of scored text. Sums over its `count` answers."""

    right: float
    logprob: float
    count: int = 1


Found = dict[Cell, dict[str, list[Unit]]]
"""Cell -> task -> units of one stream."""
