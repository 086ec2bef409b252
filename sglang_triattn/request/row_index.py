"""Finds, among idle rows, those whose first token ids are the first ones of a prompt.

A row can be resumed from some length on, which is known when it is left; prompts that are shorter, or differ before it,
cannot use it. The index files a row under a hash of its ids up to there, in whole blocks. A prompt looks up one hash
for each of its blocks, however many rows there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator

BLOCK = 32
"""Token ids of a block."""


def block_hashes(ids: array, owner: Hashable, known: list[int] | None = None) -> list[int]:
    """One hash for each number of leading blocks of `ids`, from none to all that are whole.

    Args:
        ids: token ids, 8 bytes each.
        owner: what else must match.
        known: those of fewer leading blocks, which are not computed again.
    """
    hashes = [hash(owner)] if known is None else known.copy()
    for start in range(BLOCK * (len(hashes) - 1), len(ids) - BLOCK + 1, BLOCK):
        hashes.append(hash((hashes[-1], ids[start : start + BLOCK].tobytes())))
    return hashes


def row_hash(ids: array, least: int, owner: Hashable, known: list[int] | None = None) -> int:
    """What a row is filed under. It stays the same while the row is cut or copied.

    Args:
        ids: its token ids.
        least: the fewest of them after which a prompt may go on.
        owner: as for `block_hashes`.
        known: `block_hashes` of some of its first ids, with the same owner.
    """
    blocks = least // BLOCK
    if known is None or len(known) <= blocks:
        return block_hashes(ids[:least], owner, known)[-1]
    return known[blocks]


def common_length(one: array, other: array) -> int:
    """How many first ids of two texts are equal."""
    least, most = 0, min(len(one), len(other))
    while least < most:
        middle = (least + most + 1) // 2
        if one[least:middle] == other[least:middle]:
            least = middle
        else:
            most = middle - 1
    return least


class RowIndex:
    """Names of idle rows, by the ids that a prompt must begin with."""

    def __init__(self) -> None:
        self._names: dict[int, list[int]] = {}
        self._hash_of: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._names)

    def add(self, name: int, found: int) -> None:
        """Files a row under its `row_hash`."""
        self._hash_of[name] = found
        self._names.setdefault(found, []).append(name)

    def discard(self, name: int) -> None:
        """Forgets a row, if it is there."""
        found = self._hash_of.pop(name, None)
        if found is not None:
            self._names[found].remove(name)
            if not self._names[found]:
                del self._names[found]

    def clear(self) -> None:
        """Forgets all rows."""
        self._names.clear()
        self._hash_of.clear()

    def candidates(self, hashes: list[int]) -> Iterator[int]:
        """Rows that a prompt with these `block_hashes` may go on after, those filed under the most blocks first."""
        for found in reversed(hashes):
            yield from reversed(self._names.get(found, ()))
