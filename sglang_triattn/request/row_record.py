"""What rounds did to one row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sglang_triattn.rounds.inputs import NO_INPUTS, TurnInputs
from sglang_triattn.rounds.plan import Plan

FirstEvicted = Callable[[], int]
"""Reads the first position of a row that no longer holds its original token after a round."""


@dataclass
class RowRecord:
    """What rounds did to one row. It stays with the row from one turn of a conversation to the next.

    Attributes:
        evicted_tokens: tokens evicted from the row.
        unordered_len: entries at the front of the row that rounds have left out of order.
        scattered_len: entries at the front of the row, between whose tokens others are missing; each entry after them
            lies at its logical position less the evicted tokens.
        prompt_len: length of the prompt after which the private part began, that of the first turn.
        first_evicted_pos: first position evicted by any round except those of `unread`, or to which input tokens have
            moved; None before any.
        inputs: input tokens of resumed turns, which rounds leave out.
        unread: first evicted positions of the last two rounds, whose copies from the device may still be in flight.
    """

    prompt_len: int
    evicted_tokens: int = 0
    unordered_len: int = 0
    scattered_len: int = 0
    first_evicted_pos: int | None = None
    unread: tuple[FirstEvicted, ...] = ()
    inputs: TurnInputs = NO_INPUTS

    def unordered_before(self, plan: Plan) -> int:
        """Entries at the front of the row that are out of order once a round has moved its input tokens."""
        return max(self.unordered_len, plan.target) + plan.moved_len if plan.moved else self.unordered_len

    def add_round(self, plan: Plan, first_evicted: FirstEvicted, unordered_len: int, tail: int = 0) -> None:
        """Records a round, and reads the position of the round before the last, whose copy finished long ago.

        Args:
            tail: newest entries whose tokens follow one another if they did before, as far as that is known.
        """
        if len(self.unread) == 2:
            oldest = self.unread[0]()
            self._note_first(oldest)
        if plan.moved:
            # From there on, entries no longer lie at their logical positions.
            self._note_first(plan.target)
        self.inputs = plan.inputs_after(self.inputs)
        self.evicted_tokens += plan.evicted_tokens
        self.unordered_len = unordered_len
        # Input tokens that an earlier round has moved away may be missing among the newest.
        self.scattered_len = max(plan.new_length - tail, self.scattered_len - plan.evicted_tokens)
        self.unread = (*self.unread[-1:], first_evicted)

    def _note_first(self, position: int) -> None:
        known = self.first_evicted_pos
        self.first_evicted_pos = position if known is None else min(position, known)

    def exact_prefix_len(self) -> int | None:
        """Entries before the first evicted position of any head or layer; None if nothing was evicted.

        These entries lie at their logical positions.
        """
        if not self.evicted_tokens:
            return None
        read = [position() for position in self.unread]
        return min(read if self.first_evicted_pos is None else [*read, self.first_evicted_pos])
