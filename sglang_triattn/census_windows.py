"""Ownership check of the window layers' own pool, which `sglang_triattn.census` does not cover.

slot of the full layers    has one peer in the window layers' pool, or none; a free one has none
page of that pool          free | the peer of one page of the full layers, and owned by its owner
row of a holder            [frozen, cursor) without peers | [cursor, length) with peers
                           what the next query sees: with peers, whoever owns it
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_triattn.census import FREE, TREE, Entries, Holders, Pool, fault_of_claims, read_claims, read_rows


@dataclass(frozen=True)
class Peers:
    """The window layers' pool.

    Attributes:
        pages: its pages in use, numbered from 1.
        free: [n] int64: numbers of its free pages.
        of: [slots] int64: the peer of each slot of the full layers; 0 without one.
        tree: how many of its slots the radix tree counts as its own.
        cursor: [holders] int64: the first entry after the frozen ones that has a peer.
        reach: tokens before its own that a query sees.
        computed: [holders] int64: the entry at which the next query stands; later ones are for drafted tokens.
    """

    pages: int
    free: np.ndarray
    of: np.ndarray
    tree: int
    cursor: np.ndarray
    reach: int
    computed: np.ndarray


def find_peer_fault(pool: Pool, holders: Holders, peers: Peers) -> str | None:
    """The first fault in the books of the window layers' pool, as the end of a sentence, or None if there is none.

    Args:
        pool: the full layers' pool, in which `sglang_triattn.census.find_fault` has found none.
    """
    return next(_faults(pool, holders, peers), None)


def _faults(pool: Pool, holders: Holders, peers: Peers) -> Iterator[str]:
    entries = read_rows(pool.table, holders)
    pages, owners = read_claims(pool, holders, entries)
    size = pool.page_size
    blocks = peers.of[pages[:, None] * size + np.arange(size)]
    first = blocks[:, 0]
    in_step = (blocks == 0) | (blocks == first[:, None] + np.arange(size))
    # Only the end of a page may be unused.
    gap = (blocks[:, :-1] == 0) & (blocks[:, 1:] > 0)
    wrong = ~in_step.all(1) | (first % size != 0) | gap.any(1)
    if wrong.any():
        yield f"{pool.name(int(pages[wrong][0]))} has peers that are not one page"
    left = (owners == FREE) & (first > 0)
    if left.any():
        yield f"{pool.name(int(pages[left][0]))} is free, but still has a peer in the window layers' pool"
    held = first > 0
    claimed = np.concatenate([peers.free, first[held] // size])
    by = np.concatenate([np.full(len(peers.free), FREE), owners[held]])
    yield from fault_of_claims(
        claimed, by, peers.pages, holders, lambda page: f"{pool.name(page)} of the window layers' pool"
    )
    in_tree = int((held & (owners == TREE)).sum()) * size
    if in_tree != peers.tree:
        yield f"the tree counts {peers.tree} slots of the window layers' pool, but holds {in_tree}"
    yield from _entry_faults(holders, entries, peers)


def _entry_faults(holders: Holders, entries: Entries, peers: Peers) -> Iterator[str]:
    number, position = entries.holder, entries.position
    has = peers.of[entries.slots] > 0
    left_window = entries.private & (position < peers.cursor[number])
    seen = position >= (np.minimum(holders.length, peers.computed) - peers.reach)[number]
    for wrong, what in (
        (left_window & has, "still has a peer, although the window is past it"),
        (entries.private & ~left_window & ~has, "has no peer, although the window is not past it"),
        (seen & ~has, "has no peer, although the next query sees it"),
    ):
        if wrong.any():
            at = int(wrong.argmax())
            name = holders.name(int(number[at]))
            yield f"slot {entries.slots[at]}, which is entry {position[at]} of {name}, {what}"
