"""What `solve` compares: one choice at one size of what a round keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.quality.choices import DEFAULT, DENSE, Choice, ChoiceError, read_choice
from sglang_triattn.config import Config


@dataclass(frozen=True)
class Cell:
    """One choice at one size.

    Attributes:
        share: budget as a share of the tokens of the dense text, or None.
        budget: budget in tokens, or None.
    """

    choice: Choice
    share: float | None = None
    budget: int | None = None

    def config(self, dense_tokens: int, interval: int | None) -> Config:
        """The cell's settings for a problem whose dense text has so many tokens."""
        tokens = self.budget if self.share is None else round(self.share * dense_tokens)
        return self.choice.config(max(1, tokens or 1), interval)


def cells_of(names: Sequence[str], shares: Sequence[float], budgets: Sequence[int], base: str = DEFAULT) -> list[Cell]:
    """Every choice at every size, shares first; dense and `base` are always included.

    Raises:
        ChoiceError: a name stands for no choice, or for one that needs the text before it is written.
    """
    choices = [read_choice(name) for name in dict.fromkeys((DENSE, base, *names))]
    for choice in choices:
        if choice.reads_again:
            raise ChoiceError(f"{choice.name} needs the whole text before it is written: leave it out here.")
    sizes: list[tuple[float | None, int | None]] = [(share, None) for share in shares]
    sizes += [(None, budget) for budget in budgets]
    return [Cell(choice, *size) for size in sizes for choice in choices]
