"""Which running requests may have outgrown their budget: each is looked at now and then, not in every step.

SGLang part: `Req` (sglang/srt/managers/schedule_batch.py).

A look at a request shows how far its next round is away, and so when the next look must be. So a step looks at few
requests, however many run. Each grows by the tokens of one step between two looks at the batch, except that SGLang may
count the results of two steps at once when it stops overlapping them, and none of a later one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_triattn.patches.request.compressed import compressions_of
from sglang_triattn.request.lifecycle import CompressedRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

LONGEST = 64
"""Most steps between two looks, for which a request that has ended may be referred to."""


class DueLooks:
    """Chooses whom to look at in each step of a running batch; called once a step.

    A request that was not in the batch of the step before is looked at, and so is one with another row. That the tree
    takes more of a row only puts its round off.

    Args:
        tokens_per_step: most tokens by which a request grows in a step.

    Attributes:
        changed: whether the last step had other requests, or others' order, than the one before.
    """

    def __init__(self, tokens_per_step: int = 1) -> None:
        self._tokens = tokens_per_step
        self.forget()

    def forget(self) -> None:
        """Looks at every request in the next step."""
        self.changed, self._step, self._rows = True, 0, -1
        self._requests: list[Req] = []
        self._places: dict[Req, int] = {}
        self._looks: defaultdict[int, list[Req]] = defaultdict(list)

    def of_step(self, requests: Sequence[Req]) -> list[int]:
        """Indices of the requests to look at in the next step; `again` must be called for those that may be due later.

        Args:
            requests: the running requests.
        """
        self._step += 1
        looks = self._looks.pop(self._step, [])
        rows = CompressedRequest.rows
        if rows != self._rows:
            pairs = zip(requests, compressions_of(requests), strict=True)
            looks += [request for request, compression in pairs if compression.due_protected < 0]
        # Compares identities, without a call for each.
        joined = self._requests != requests
        self.changed, self._rows = joined or rows != self._rows, rows
        if joined:
            places = dict(zip(requests, range(len(requests)), strict=True))
            looks += places.keys() - self._places.keys()
            self._requests, self._places = list(requests), places
        places = self._places
        return sorted({places[request] for request in looks if request in places})

    def again(self, request: Req, left: int) -> None:
        """Has a request looked at again, in the next step if `left` is 0.

        Args:
            left: tokens by which it must grow before a round is due.
        """
        steps = min(left // self._tokens - 1, LONGEST)
        self._looks[self._step + max(steps, 1)].append(request)
