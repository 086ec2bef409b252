"""Which first rounds come early in a step, so that few rounds meet in one; see `sglang_triattn.rounds.level`.

SGLang part: `Req` (sglang/srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_triattn.patches.request.bounds import longest_answer
from sglang_triattn.patches.request.compressed import compression_of
from sglang_triattn.rounds.level import choose_early, earliest, lot_for, steps_until_overdue
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


class Leveller:
    """Looks at the running requests only in steps in which an early round may be wanted.

    Args:
        rules: the server's.
        tokens_per_step: most tokens by which a request grows in a step: above 1 with speculative decoding.
    """

    def __init__(self, rules: RoundRules, tokens_per_step: int = 1) -> None:
        self._rules, self._tokens = rules, tokens_per_step
        # Whether others run than at the last look at all of them, and whether any had yet to have its first round.
        self._changed, self._fresh, self._sleep = True, True, 0

    def early(self, requests: Sequence[Req], num_due: int, *, joined: bool = True) -> list[int]:
        """Indices of the requests whose first round comes early in this step.

        Args:
            requests: the running requests, in order of admission, after a look at those that may be due.
            num_due: how many rounds are due.
            joined: whether other requests run than in the last step.
        """
        if self._rules.most_rounds == 0:
            return []
        lot = lot_for(len(requests), self._rules.interval, self._rules.most_rounds)
        self._sleep -= 1
        self._changed |= joined
        if len(requests) <= lot or num_due >= lot:
            return []
        if not (self._changed or (self._fresh and (num_due or self._sleep <= 0))):
            return []
        self._changed, self._fresh = False, False
        steps, movable, indices = [], [], []
        for index, request in enumerate(requests):
            compression = compression_of(request)
            settings = compression.settings
            # Without settings, or not looked at yet: it holds no row that a round may touch.
            if settings is None:
                continue
            self._fresh |= not compression.rounds
            if compression.due_protected < 0:
                continue
            left = compression.due_len - request.kv.kv_committed_len
            longest = settings.interval - earliest(settings.interval)
            steps.append(left // self._tokens)
            movable.append(not compression.rounds and 0 < left <= min(longest, _most_to_come(request) - 1))
            indices.append(index)
        after = [left if left > 0 else self._rules.interval // self._tokens for left in steps]
        self._sleep = steps_until_overdue(after, lot)
        return [indices[place] for place in choose_early(steps, movable, lot)]


def _most_to_come(request: Req) -> int:
    """Tokens that a request may still generate: one that ends before its round is due has none early either."""
    return longest_answer(request) - len(request.output_ids)
