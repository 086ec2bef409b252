"""Level rounds: which rounds run in a step, so that few meet in one, however many requests arrived together.

A round costs the host and the device about as much as the step that it delays, if many meet. All requests grow by a
token in each step, so those that arrived together would meet for life. Therefore a request's first round may come
early, never late: from then on it has its rounds together with those that shared this one, every `interval` tokens.
Choices depend on token counts alone, so every rank and stage makes the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

LOT = 8
"""Rounds of one step where there is a choice: fewer waste launches, more delay the step."""


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


def earliest(budget: int, interval: int) -> int:
    """Private tokens from which an early round frees enough to be worth its cost: a quarter of a regular one."""
    return budget + max(interval // 4, 1)


def choose_rounds(steps: Sequence[int], movable: Sequence[bool], lot: int) -> list[int]:
    """Indices of the requests that have a round in this step, in their order.

    All that are due have one. If there are some, others join them until there are `lot`. If there are none, others
    begin as late as `lot` rounds a step allow.

    Args:
        steps: for each request, steps that may still pass before its round is due; 0 or fewer if it is due.
        movable: whether its round may come early.
        lot: most rounds of a step, if the due ones are not more.
    """
    due = [index for index, left in enumerate(steps) if left <= 0]
    room = lot - len(due)
    candidates = [index for index, left in enumerate(steps) if left > 0 and movable[index]]
    if room <= 0 or not candidates:
        return due
    take = room if due else min(room, _overdue(steps, lot))
    # A stable sort: among equals, those that were admitted first.
    return sorted(due + sorted(candidates, key=steps.__getitem__)[:take])


def _overdue(steps: Sequence[int], lot: int) -> int:
    """Rounds that must run now, because those of later steps, `lot` in each, come too late for some."""
    ordered = sorted(steps)
    return max(0, *(bisect_right(ordered, left) - lot * left for left in set(ordered)))
