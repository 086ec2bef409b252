"""Greedy generation in a `CompactedCache`, with the server's rounds and with drafts that the model verifies.

A draft is a text that a row will probably write. Its next tokens go through the model with the row's newest token, in
one call for all rows; the longest prefix that the model would have written itself stays, and the rest is dropped. So
the text is the model's own, and only the number of calls depends on the draft. A call with more tokens rounds
differently: where two tokens are nearly as likely, the other may win.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from sglang_triattn.transformers_cache.cache import CompactedCache
from sglang_triattn.transformers_cache.feed import forward
from sglang_triattn.transformers_cache.policy import CacheError

BLOCK = 16
"""Most tokens of a row that go through the model at once."""
# Lengths of the last tokens that are looked for in a draft, longest first.
_TAILS = (8, 4, 2)


class Draft:
    """What a row will probably write, and how far it has come.

    Args:
        ids: the draft; may be empty.
    """

    def __init__(self, ids: Sequence[int] = ()) -> None:
        self.ids = list(ids)
        self._source, self._place, self._missed = self.ids, 0, False

    def next(self, count: int) -> list[int]:
        """At most `count` tokens that are expected next."""
        return self._source[self._place : self._place + count]

    def advance(self, written: list[int], new: int) -> None:
        """Moves on by the last `new` tokens of the row's text `written`, the last of which may differ from the draft.

        After one other token, the draft goes on one token later. After two in a row, it goes on where the draft, or
        else the row's own text, holds what the row wrote last.
        """
        missed = written[-new:] != self.next(new)
        if missed and self._missed and new == 1:
            self._source, self._place = self._found(written)
        else:
            self._place += new
        self._missed = missed

    def _found(self, written: list[int]) -> tuple[list[int], int]:
        for size in _TAILS:
            tail = written[-size:]
            ends = [end for end in range(size, len(self.ids)) if self.ids[end - size : end] == tail]
            if ends:
                return self.ids, min(ends, key=lambda end: abs(end - self._place))
            own = next((end for end in range(len(written) - 1, size - 1, -1) if written[end - size : end] == tail), 0)
            if own:
                return written, own
        return self.ids, self._place + 1


@torch.no_grad()
def generate(
    model: Any,
    cache: CompactedCache,
    first: Sequence[int],
    *,
    limit: int,
    stop: Collection[int] = (),
    drafts: Sequence[Sequence[int]] | None = None,
    block: int = BLOCK,
    settled: Callable[[CompactedCache, Sequence[int]], None] | None = None,
) -> list[list[int]]:
    """Continues every row greedily; a round runs before the token that would take a row past its trigger.

    Args:
        cache: holds the whole prompt of each row; used up, because unfinished rows go on in a branch of it once half of
            them are finished.
        first: [B], the first token of each row's text, not yet in the cache.
        limit: most tokens of a text.
        stop: tokens that end a text; they are its last.
        drafts: [B] texts that the rows will probably write, `first` included; they change nothing but speed.
        block: most tokens of a row in one call of the model.
        settled: called with the cache in use and the numbers of the rows that it holds, after each call of the model,
            once rejected tokens are dropped, and after each branch.

    Returns:
        [B][n] token ids, `first` included.

    Raises:
        CacheError: a number does not fit, or a row has no room.
    """
    count = len(cache.rows.lengths)
    if min(limit, block) < 1:
        raise CacheError(f"limit is {limit} and block is {block}, but both must be at least 1.")
    if len(first) != count or (drafts is not None and len(drafts) != count):
        raise CacheError(f"first and drafts must hold one entry for each of the {count} rows.")
    texts = [[int(token)] for token in first]
    ahead = [Draft(draft) for draft in (drafts or [()] * count)]
    for text, draft in zip(texts, ahead, strict=True):
        draft.advance(text, 1)
    numbers = list(range(count))
    while True:
        places = [place for place, row in enumerate(numbers) if len(texts[row]) < limit and texts[row][-1] not in stop]
        if not places:
            return texts
        if 2 * len(places) <= len(numbers):
            cache, numbers = cache.branch(places), [numbers[place] for place in places]
            places = list(range(len(numbers)))
            if settled is not None:
                settled(cache, numbers)
        own = [(texts[row], ahead[row]) if place in places else None for place, row in enumerate(numbers)]
        _step(model, cache, own, limit, stop, block)
        if settled is not None:
            settled(cache, numbers)


def _step(
    model: Any,
    cache: CompactedCache,
    own: Sequence[tuple[list[int], Draft] | None],
    limit: int,
    stop: Collection[int],
    block: int,
) -> None:
    """Calls the model once and extends the texts; a row whose text is finished has None in place of text and draft."""
    rows = cache.rows
    rows.run_due_rounds()
    blocks: list[list[int]] = [[] for _ in own]
    for row, one in enumerate(own):
        if one is not None:
            text, draft = one
            room = min(block, rows.until_due(row), limit - len(text))
            blocks[row] = [text[-1], *draft.next(room - 1)]
    size = max(map(len, blocks))
    ids = torch.tensor([given + [0] * (size - len(given)) for given in blocks])
    likely = forward(model, cache, ids, counts=[len(given) for given in blocks], logits=size).argmax(-1).tolist()
    rejected = [0] * len(own)
    for row, one in enumerate(own):
        if one is not None:
            text, draft = one
            new = _accepted(blocks[row], likely[row], stop)
            text += new
            draft.advance(text, len(new))
            rejected[row] = len(blocks[row]) - len(new)
    rows.drop_newest(rejected)


def _accepted(block: Sequence[int], likely: Sequence[int], stop: Collection[int]) -> list[int]:
    """The tokens that follow block[0]: `likely` as long as the block agrees, and one more."""
    new: list[int] = []
    for place, token in enumerate(likely[: len(block)]):
        new.append(token)
        if token in stop or block[place + 1 : place + 2] != [token]:
            break
    return new
