"""Input tokens of resumed turns: where they lie in a row, and when they move out of the way of rounds.

A turn that resumes a row appends its messages and tool results after what the model generated before. Rounds leave them
out: before a round, they move to directly after the frozen part, and are as good as frozen from then on.

    before  0      frozen                                                                      length
            |-------|-- generated --|-- input --|-- generated --|-- input --|-- generated, newest --|
    after   |-------|-- input --|-- input --|-- generated --|-- generated --|-- generated, newest --|
                                             first scored

Only the row changes: it is a list of slots, and neither attention nor scores depend on the order of keys. A stretch is
whole pages, so that its slots move as they are: up to a page less one generated token at each end of it stays too.
Windows of window layers are counted along the row, so there the newest tokens stay where they are, input or not, and
what is left of a stretch moves before a later round.
"""

from __future__ import annotations

from dataclasses import dataclass

Stretch = tuple[int, int]
"""[start, end) of a row, in entries."""


@dataclass(frozen=True)
class TurnInputs:
    """The input tokens that a row has got from resumed turns.

    Attributes:
        end: those that have moved lie before this entry, and nothing before it is scored or evicted; 0 if none has.
        waiting: stretches that have not moved yet, ascending and whole pages. The last one may end after the row, in
            tokens that are still to be prefilled or generated.
    """

    end: int = 0
    waiting: tuple[Stretch, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.end or self.waiting)

    def appended(self, start: int, end: int, page_size: int) -> TurnInputs:
        """With the input of one more turn, in the entries [start, end) of the row, widened to whole pages."""
        first, last = start - start % page_size, ceil_align(end, page_size)
        if self.waiting and first <= self.waiting[-1][1]:
            first, earlier = self.waiting[-1][0], self.waiting[:-1]
        else:
            earlier = self.waiting
        return TurnInputs(self.end, (*earlier, (first, last)))

    def cut(self, end: int, page_size: int) -> TurnInputs:
        """Those of a row that is cut after `end` entries; the page in which it ends stays whole."""
        last = ceil_align(end, page_size)
        return TurnInputs(self.end, tuple((start, min(stop, last)) for start, stop in self.waiting if start < end))

    def target(self, frozen: int, page_size: int) -> int:
        """Where the next stretches move to, and the first entry that may be scored: whole pages if there are any.

        Args:
            frozen: entries at the front that stay in any case.
        """
        return ceil_align(max(frozen, self.end), page_size) if self else frozen

    def waiting_in(self, first: int, end: int) -> tuple[Stretch, ...]:
        """The parts of the waiting stretches that lie in the entries [first, end)."""
        parts = [(max(start, first), min(stop, end)) for start, stop in self.waiting]
        return tuple((start, stop) for start, stop in parts if start < stop)

    def waiting_len(self, first: int, end: int) -> int:
        """Entries in `waiting_in`."""
        return _total(self.waiting_in(first, end))

    def all_waiting_len(self, first: int) -> int:
        """Entries in the waiting stretches from `first` on, those after the end of the row included."""
        return sum(stop - max(start, first) for start, stop in self.waiting if stop > first)

    def after_round(self, first: int, end: int, moved: int, evicted: int) -> TurnInputs:
        """After a round that moved all stretches before `end` to `first`, and evicted tokens before `end`.

        Args:
            moved: how many entries have moved.
            evicted: how many entries the row has lost.
        """
        if not self:
            return self
        left = [(max(start, end) - evicted, stop - evicted) for start, stop in self.waiting if stop > end]
        # Those of them that lie before `first` stay there.
        return TurnInputs(first + moved, tuple(left))


NO_INPUTS = TurnInputs()


def ceil_align(length: int, page_size: int) -> int:
    """Slots in the whole pages that hold `length` tokens."""
    return -(-length // page_size) * page_size


def _total(stretches: tuple[Stretch, ...]) -> int:
    return sum(stop - start for start, stop in stretches)
