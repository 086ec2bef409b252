"""Ownership check: every page of a KV pool and every row of a row table must have exactly one owner.

A census looks at one moment and names the first fault. It is for tests and debugging: it copies rows, the free list and
the tree's slots to the host, so it waits for the device.

    page of the pool     free | the tree's | private to one holder        exactly one of these
    row of the table     free | one holder's                              exactly one of these
    row of a holder      [0, frozen) the tree's, entry for entry | [frozen, length) private
    slots that a queued step writes: its own requests'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

FREE, TREE = -2, -1
"""Owners that are not holders; a holder is identified by its number."""


def _nothing() -> np.ndarray:
    return np.empty(0, np.int64)


class IntegrityError(RuntimeError):
    """The server's books are wrong. The message is one sentence: when, and which slot or row belongs to whom."""


@dataclass(frozen=True)
class Holders:
    """Everyone who holds a row: requests and idle conversations, each identified by its number.

    Attributes:
        name: maps a number to the holder's name in messages: "request r5".
        row: [n] int64: rows in the row table.
        length: [n] int64: entries of each row, including frozen ones.
        frozen: [n] int64: entries at the front that the tree owns, whole pages.
        covered: [n] int64: frozen entries that a lock on the tree vouches for.
        path: [sum of covered] int64: the tree's slots for those entries, one holder after another.
        more_rows, more_rows_of: [m] int64: further rows of a holder, and its number.
        others, others_of: [k] int64: private slots outside the row, each once, and the holder's number.
    """

    name: Callable[[int], str]
    row: np.ndarray
    length: np.ndarray
    frozen: np.ndarray
    covered: np.ndarray
    path: np.ndarray
    more_rows: np.ndarray = field(default_factory=_nothing)
    more_rows_of: np.ndarray = field(default_factory=_nothing)
    others: np.ndarray = field(default_factory=_nothing)
    others_of: np.ndarray = field(default_factory=_nothing)


@dataclass(frozen=True)
class Pool:
    """A KV pool and a row table.

    Attributes:
        page_size: slots per page.
        pages: pages in use, numbered from 1; everything before is padding.
        free: [n] int64: numbers of the free pages.
        tree: [m] int64: slots of the radix tree, whole pages.
        table: [rows + 1, width] int32 on any device: the slots of each row; row 0 is padding.
        free_rows: numbers of the rows that are free.
    """

    page_size: int
    pages: int
    free: np.ndarray
    tree: np.ndarray
    table: torch.Tensor
    free_rows: Sequence[int]

    def name(self, page: int) -> str:
        """Name of a page in messages."""
        if self.page_size == 1:
            return f"slot {page}"
        return f"page {page} (slots {page * self.page_size} to {(page + 1) * self.page_size - 1})"


@dataclass(frozen=True)
class Write:
    """Slots [n] int64 that a queued step writes for the holder with number `holder`."""

    holder: int
    slots: np.ndarray


@dataclass(frozen=True)
class Entries:
    """Entries of all holders' rows, one row after another.

    Attributes:
        slots, holder, position: [n] int64: the slot, the number of its holder, and its place in the row.
        private: [n] bool: whether it lies after the frozen entries.
    """

    slots: np.ndarray
    holder: np.ndarray
    position: np.ndarray
    private: np.ndarray


def find_fault(pool: Pool, holders: Holders, writes: Sequence[Write] = ()) -> str | None:
    """The first fault in the books, as the end of a sentence, or None if there is none."""
    return next(_faults(pool, holders, writes), None)


def _faults(pool: Pool, holders: Holders, writes: Sequence[Write]) -> Iterator[str]:
    yield from _row_fault(pool, holders)
    entries = read_rows(pool.table, holders)
    yield from _page_shape_fault(pool, holders, entries)
    pages, owners = read_claims(pool, holders, entries)
    yield from fault_of_claims(pages, owners, pool.pages, holders, pool.name)
    yield from _frozen_fault(holders, entries)
    yield from _write_fault(pool, holders, writes, pages, owners)


def read_rows(table: torch.Tensor, holders: Holders) -> Entries:
    """Reads all rows with one copy from the device."""
    lengths = holders.length
    number = np.repeat(np.arange(len(lengths)), lengths)
    position = np.arange(len(number)) - (lengths.cumsum() - lengths)[number]
    places = torch.from_numpy((holders.row * table.shape[1])[number] + position)
    slots = table.view(-1).take(places.to(table.device)).cpu().numpy().astype(np.int64)
    return Entries(slots, number, position, position >= holders.frozen[number])


def _row_fault(pool: Pool, holders: Holders) -> Iterator[str]:
    rows = np.concatenate([np.array(pool.free_rows, np.int64), holders.row, holders.more_rows])
    numbers = np.arange(len(holders.row))
    owners = np.concatenate([np.full(len(pool.free_rows), FREE), numbers, holders.more_rows_of])
    yield from fault_of_claims(rows, owners, pool.table.shape[0] - 1, holders, lambda row: f"row {row}")
    width, length, frozen = pool.table.shape[1], holders.length, holders.frozen
    wrong = (frozen < 0) | (frozen > length) | (length > width)
    if wrong.any():
        n = int(wrong.argmax())
        yield (
            f"{holders.name(n)} has {frozen[n]} frozen ones among {length[n]} entries in row {holders.row[n]}, "
            f"which is {width} wide"
        )
    if pool.page_size > 1 and (frozen % pool.page_size).any():
        n = int((frozen % pool.page_size > 0).argmax())
        yield f"{holders.name(n)} has {frozen[n]} frozen entries, which are not whole pages of {pool.page_size}"


def _page_shape_fault(pool: Pool, holders: Holders, entries: Entries) -> Iterator[str]:
    """Above page size 1: an entry has the same offset in its page as in its row, and pages are owned whole."""
    if pool.page_size == 1:
        return
    offset = entries.position % pool.page_size
    first = entries.slots[np.arange(len(offset)) - offset]
    wrong = np.flatnonzero((entries.slots != first + offset) | (first % pool.page_size != 0))
    if len(wrong):
        at = wrong[0]
        name = holders.name(int(entries.holder[at]))
        yield f"slot {entries.slots[at]} is entry {entries.position[at]} of {name}, but another place of its page"
    in_page = np.arange(len(pool.tree)) % pool.page_size
    wrong = np.flatnonzero(pool.tree % pool.page_size != in_page)
    if len(wrong):
        yield f"slot {pool.tree[wrong[0]]} belongs to the tree, but not the whole of its page"


def read_claims(pool: Pool, holders: Holders, entries: Entries) -> tuple[np.ndarray, np.ndarray]:
    """The claimed pages and the owner of each claim; a disputed page appears more than once."""
    own, tree = entries.private, pool.tree
    if pool.page_size > 1:
        own, tree = own & (entries.position % pool.page_size == 0), tree[:: pool.page_size] // pool.page_size
    private = entries.slots[own]
    if pool.page_size > 1:
        private = private // pool.page_size
    owners = [np.full(len(pool.free), FREE), np.full(len(tree), TREE), holders.others_of, entries.holder[own]]
    return np.concatenate([pool.free, tree, holders.others, private]), np.concatenate(owners)


def fault_of_claims(
    claimed: np.ndarray, owners: np.ndarray, last: int, holders: Holders, name: Callable[[int], str]
) -> Iterator[str]:
    """Checks that each of the numbers 1 to `last` is claimed exactly once, and no other number is."""
    if len(claimed) and (claimed.min() < 1 or claimed.max() > last):
        outside = np.flatnonzero((claimed < 1) | (claimed > last))
        yield f"{name(int(claimed[outside[0]]))} does not exist, but {_belongs(owners[outside[:1]], holders)}"
        return
    count = np.bincount(claimed, minlength=last + 1)
    count[0] = 1
    if (count == 1).all():
        return
    wrong = int(count.argmax() if count.max() > 1 else count.argmin())
    yield f"{name(wrong)} {_belongs(owners[claimed == wrong], holders)}"


def _belongs(owners: np.ndarray, holders: Holders) -> str:
    """Says in a message who owns a thing with these owners."""
    found = sorted(set(owners.tolist()) - {FREE}, key=lambda owner: (owner == TREE, owner))
    names = ["the tree" if owner == TREE else holders.name(owner) for owner in found]
    if not len(owners):
        return "has no owner and is not free"
    if not names:
        return "is free" if len(owners) == 1 else "is free twice"
    twice = " twice" if len(names) == 1 and (owners != FREE).sum() > 1 else ""
    return f"belongs to {' and to '.join(names)}{twice}" + (" and is free" if FREE in owners else "")


def _frozen_fault(holders: Holders, entries: Entries) -> Iterator[str]:
    short = holders.covered < holders.frozen
    if short.any():
        n = int(short.argmax())
        yield (
            f"{holders.name(n)} has {holders.frozen[n]} frozen entries in row {holders.row[n]}, "
            f"but its lock on the tree covers {holders.covered[n]} of them"
        )
        return
    frozen = ~entries.private
    wrong = entries.slots[frozen] != holders.path
    if wrong.any():
        at = int(wrong.argmax())
        entry = np.flatnonzero(frozen)[at]
        yield (
            f"slot {entries.slots[entry]} is entry {entries.position[entry]} of "
            f"{holders.name(int(entries.holder[entry]))}, which is frozen, "
            f"but the tree holds it in slot {holders.path[at]}"
        )


def _write_fault(
    pool: Pool, holders: Holders, writes: Sequence[Write], pages: np.ndarray, owners: np.ndarray
) -> Iterator[str]:
    if not writes:
        return
    owner_of = np.empty(pool.pages + 1, np.int64)
    owner_of[pages] = owners
    slots = np.concatenate([write.slots for write in writes])
    number = np.repeat([write.holder for write in writes], [len(write.slots) for write in writes])
    inside = (slots >= pool.page_size) & (slots < (pool.pages + 1) * pool.page_size)
    found = owner_of[np.where(inside, slots, pool.page_size) // pool.page_size]
    wrong = np.flatnonzero(~inside | (found != number))
    if len(wrong):
        at = wrong[0]
        what = _belongs(found[at : at + 1], holders) if inside[at] else "does not exist"
        yield f"slot {slots[at]}, which a queued step writes for {holders.name(int(number[at]))}, {what}"
