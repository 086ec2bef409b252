"""What a draft model keeps: the tokens that the scored model keeps, in their columns or one before."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sglang_triattn.kernels.compact.reference import remap
from sglang_triattn.kernels.follower import Follower
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.pools import PADDING_SLOT

LAYERS, HEADS, KEPT, RECENT, FROZEN, SLOTS = 3, 2, 12, 4, 2, 160


class Row:
    """One request's row, and both models' pools, which hold the number of a token as its K/V."""

    def __init__(self, layers: int, heads: int, *, ahead: bool = True) -> None:
        self.target = [torch.full((SLOTS, HEADS, 1), -1.0) for _ in range(LAYERS)]
        self.draft = [torch.full((SLOTS, heads, 1), -1.0) for _ in range(layers)]
        self.follower = Follower(Mover(self.draft, [], kernels=False), layers, heads, ahead=ahead)
        self.mover = Mover(self.target, [], kernels=False)
        self.free = torch.randperm(SLOTS - 1).add(1).tolist()
        self.slots, self.tokens = [], 0

    def append(self, count: int) -> None:
        """Computes tokens: in the draft model, each lies in its own slot or in that of the one before."""
        for _ in range(count):
            slot = self.free.pop()
            for pool in self.target:
                pool[slot] = self.tokens
            self.tokens += 1
            for pool in self.draft:
                pool[slot] = self.tokens - (not self.follower.ahead)
            self.slots.append(slot)

    def compact(self, kept: torch.Tensor, strategy: str, cut: int | None) -> None:
        """One round; `kept` as for `Mover.move`, with one request."""
        private = torch.tensor([self.slots[FROZEN:]])
        lengths = torch.tensor([private.shape[1]])
        # The follower needs nothing of the other model's K/V, so the order of the two decides nothing.
        if strategy != "remap":
            self.mover.move(private, kept, strategy, cut=cut, lengths=lengths)
        self.follower.follow(private, kept, strategy, cut=cut, lengths=lengths)
        private, emptied = private[0].tolist(), private.shape[1] - KEPT
        if strategy == "remap":
            private = remap(torch.tensor([private]), kept)[0].tolist()
        first = KEPT if cut is None else cut
        self.free += private[first : first + emptied]
        self.slots[FROZEN:] = private[:first] + private[first + emptied :]

    def holds(self, pools: Sequence[torch.Tensor], layer: int, head: int) -> list[int]:
        return pools[layer][self.slots, head, 0].long().tolist()


def sets(kind: str, length: int) -> torch.Tensor:
    """Random kept sets of one request with the newest tokens in them."""
    older = torch.rand(LAYERS, HEADS, length - RECENT).argsort(-1)[..., : KEPT - RECENT]
    newest = torch.arange(length - RECENT, length).expand(LAYERS, HEADS, -1)
    kept = torch.cat([older, newest], -1).sort(-1).values[None]
    return {"shared": kept[:, 0, 0], "per-head": kept[:, 0], "per-layer-head": kept}[kind]


MOVES = [("fill", KEPT - RECENT), ("fill", 5), ("fill", None), ("slide", None), ("slide", 5), ("slide", KEPT - RECENT)]


@pytest.mark.parametrize(
    ("kind", "strategy", "cut"),
    [
        ("shared", "remap", None),
        *((kind, *move) for kind in ("shared", "per-head", "per-layer-head") for move in MOVES),
    ],
)
@pytest.mark.parametrize(("layers", "heads"), [(LAYERS, HEADS), (1, HEADS), (1, 3)])
@pytest.mark.parametrize("ahead", [True, False])
def test_it_keeps_the_same_tokens(kind, strategy, cut, layers, heads, ahead):
    """Prevents a draft model from attending to other tokens than the model, from one round to the next, and from
    writing to frozen slots or to those of others."""
    torch.manual_seed(0)
    row = Row(layers, heads, ahead=ahead)
    row.append(FROZEN + KEPT + 9)
    frozen = row.holds(row.draft, 0, 0)[:FROZEN]
    for evicted in (9, 1, 20, 5):
        others = [slot for slot in range(1, SLOTS) if slot not in row.slots]
        before = [pool[others].clone() for pool in row.draft]
        row.compact(sets(kind, KEPT + evicted), strategy, cut)
        for layer in range(layers):
            for head in range(heads):
                own = (layer, head) if (layers, heads) == (LAYERS, HEADS) else (LAYERS - 1, 0)
                own = (own[0], head) if kind == "per-head" and heads == HEADS else own
                followed = row.holds(row.target, *own)[FROZEN:]
                if ahead:
                    followed = [*followed[1:], row.tokens]
                assert row.holds(row.draft, layer, head) == [*frozen, *followed]
        assert all(torch.equal(pool[others], old) for pool, old in zip(row.draft, before, strict=True))
        row.append({9: 1, 1: 20, 20: 5, 5: 0}[evicted])


def test_a_row_that_is_emptied_from_its_start():
    """Prevents a write to the slot before the private ones where a round cuts the row at its first column."""
    torch.manual_seed(0)
    row = Row(LAYERS, HEADS)
    row.append(FROZEN + KEPT + 6)
    kept = torch.arange(6, KEPT + 6)[None]
    kept[0, 0] = 2
    padding = [pool[PADDING_SLOT].clone() for pool in row.draft]
    row.compact(kept, "fill", 0)
    assert row.holds(row.draft, 0, 0) == [1, 2, *row.holds(row.target, 0, 0)[FROZEN + 1 :], row.tokens]
    assert all(torch.equal(pool[PADDING_SLOT], old) for pool, old in zip(row.draft, padding, strict=True))
