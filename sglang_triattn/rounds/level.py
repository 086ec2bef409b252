"""Level rounds: which rounds run in a step, so that few meet in one, however many requests arrived together.

Many rounds in one step delay it by more than the step itself takes. All requests grow by a token in each step, so those
that arrived together would meet for life. Therefore a request's first round may come early, never late: from then on it
has its rounds together with those that shared this one, every `interval` tokens. Choices depend on token counts alone,
so every rank and stage makes the same.

What a request keeps then depends on the requests that run with it. While no more run than may have their rounds in one
step, each has its rounds when they are due.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

LOT = 8
"""Rounds of one step where there is a choice: with fewer, each costs the host more; more of them delay the step."""


def lot_for(running: int, interval: int, asked: int | None = None) -> int:
    """Most rounds of one step, if the requests allow it.

    Args:
        running: requests that run.
        interval: tokens from one round of a request to its next.
        asked: the user's number; None for LOT, or as many more as all need to have a round in three quarters of the
            interval.
    """
    if asked is not None:
        return asked
    return max(LOT, -(-4 * running // (3 * interval)))


def earliest(interval: int) -> int:
    """Tokens beyond the budget from which an early round is worth its cost: a quarter of what a regular one evicts."""
    return max(interval // 4, 1)


def choose_early(steps: Sequence[int], movable: Sequence[bool], lot: int) -> list[int]:
    """Indices of the requests that have their round in this step although it is not due.

    None while no more than `lot` requests run. If rounds are due, others join them until there are `lot`. If none are,
    others begin as late as `lot` rounds a step allow.

    Args:
        steps: for each request, steps that may still pass before its round is due; 0 or fewer if it is due.
        movable: whether its round may come early.
        lot: most rounds of a step, if the due ones are not more.
    """
    if len(steps) <= lot:
        return []
    due = sum(left <= 0 for left in steps)
    candidates = [index for index, left in enumerate(steps) if left > 0 and movable[index]]
    if due >= lot or not candidates:
        return []
    take = lot - due if due else min(lot, _overdue(steps, lot))
    # A stable sort: among equals, those that were admitted first.
    return sorted(candidates, key=steps.__getitem__)[:take]


def steps_until_overdue(steps: Sequence[int], lot: int) -> int:
    """Steps that may pass before an early round could be needed, if no request comes; at least 1."""
    ordered = sorted(steps)
    return max(min((left - (index + 1) // lot for index, left in enumerate(ordered)), default=1), 1)


def _overdue(steps: Sequence[int], lot: int) -> int:
    """Rounds that must run now, because those of later steps, `lot` in each, come too late for some."""
    ordered = sorted(steps)
    return max(0, *(bisect_right(ordered, left) - lot * left for left in set(ordered)))
