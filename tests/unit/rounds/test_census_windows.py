"""The census of a window layers' pool of its own names each kind of fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from sglang_triattn.census import Holders, Pool, find_fault
from sglang_triattn.census_windows import Peers, find_peer_fault

SIZE = 12


def books(page: int) -> tuple[Pool, Holders, Peers]:
    """One request: a page of the tree, one that the window has passed, and two with peers, the last one half full."""
    pages = np.array([3, 5, 2, 7])
    length = 3 * page + (page + 1) // 2
    slots = (pages[:, None] * page + np.arange(page)).ravel()
    table = torch.zeros(2, 4 * page, dtype=torch.int32)
    table[1, :length] = torch.from_numpy(slots[:length])
    of = np.zeros((SIZE + 1) * page, np.int64)
    for entry, peer in ((0, 4), (2, 1), (3, 6)):
        held = slots[entry * page : min((entry + 1) * page, length)]
        of[held] = peer * page + np.arange(len(held))
    free = np.setdiff1d(np.arange(1, SIZE + 1), pages)
    pool = Pool(page, SIZE, free, slots[:page], table, [])
    row = {"row": np.array([1]), "length": np.array([length]), "frozen": np.array([page]), "covered": np.array([page])}
    holders = Holders(lambda _: "request r1", **row, path=slots[:page])
    left = np.array([2, 3, 5, 7, 8])
    return pool, holders, Peers(8, left, of, page, np.array([2 * page]), page, np.array([length]))


@pytest.mark.parametrize("page", [1, 4])
def test_books_in_order(page):
    """Prevents a fault from being seen where there is none."""
    pool, holders, peers = books(page)
    assert find_fault(pool, holders) is None
    assert find_peer_fault(pool, holders, peers) is None


def with_peer(peers: Peers, slot: int, peer: int) -> Peers:
    of = peers.of.copy()
    of[slot] = peer
    return replace(peers, of=of)


FAULTS = {
    "free twice": (lambda pool, peers: replace(peers, free=np.append(peers.free, 2)), "is free twice"),
    "lost": (lambda pool, peers: replace(peers, free=peers.free[1:]), "has no owner and is not free"),
    "freed": (lambda pool, peers: replace(peers, free=np.append(peers.free, 1)), "belongs to request r1 and is free"),
    "left over": (lambda pool, peers: with_peer(peers, pool.free[0] * pool.page_size, 8), "is free, but still has"),
    "the tree counts more": (lambda pool, peers: replace(peers, tree=9), "the tree counts 9 slots"),
    "cursor too low": (
        lambda pool, peers: replace(peers, cursor=peers.cursor - pool.page_size),
        "has no peer",
    ),
    "cursor ahead": (lambda pool, peers: replace(peers, cursor=peers.cursor + pool.page_size), "still has a peer"),
    "window lost": (lambda pool, peers: replace(peers, reach=3 * pool.page_size), "the next query sees it"),
    "window lost before drafts": (
        lambda pool, peers: replace(peers, computed=peers.computed - 2 * pool.page_size),
        "the next query sees it",
    ),
}


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault, page):
    """Prevents a slot of this pool from being lost, given away or read after it was freed without anybody noticing."""
    pool, holders, peers = books(page)
    change, message = FAULTS[fault]
    assert message in find_peer_fault(pool, holders, change(pool, peers))


def test_half_a_page_of_peers():
    """Prevents a page from being split over two peers."""
    pool, holders, peers = books(4)
    assert "peers that are not one page" in find_peer_fault(pool, holders, with_peer(peers, 2 * 4 + 1, 0))
    assert "peers that are not one page" in find_peer_fault(pool, holders, with_peer(peers, 2 * 4 + 1, 30))
