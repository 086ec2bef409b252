"""The window layers' own slots of rows that have rounds, see `request.window_pool`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sglang_triattn.patches.request.window_pool import WindowPool
from sglang_triattn.patches.rounds.launches import Launch

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo


def free_peers(windows: WindowPool, launches: Iterable[Launch]) -> list[tuple[ReqKvInfo, int]]:
    """Frees the peers of all entries before the newest tokens; called before the rows change.

    In the page in which the newest tokens begin, a round may write K/V of others to the entries before them, whose
    peers stay.

    Returns:
        Each row's record, and its cursor after the round, which moves the rest up.

    Raises:
        RuntimeError: a round would empty or overwrite what window layers still read; nothing has changed.
    """
    rounds = []
    for launch in launches:
        shape = launch.shape
        for row, plan in launch.rounds:
            newest = plan.old_length - shape.recent
            emptied = newest if shape.strategy == "remap" else plan.frozen + shape.cut + plan.evicted_tokens
            if shape.recent <= windows.reach or emptied > newest:
                raise RuntimeError(
                    f"a round of request {row.request.rid} would touch the newest {windows.reach + 1} tokens, whose "
                    "K/V window layers still read"
                )
            rounds.append((row.kv, newest, plan.evicted_tokens))
    cursors = windows.free_before([(kv, newest) for kv, newest, _ in rounds])
    return [(kv, cursor - evicted) for (kv, _, evicted), cursor in zip(rounds, cursors, strict=True)]
