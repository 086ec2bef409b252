"""Moves of a draft model's K/V, which lie in slots of the same numbers as the scored model's: it keeps the same tokens.

Where a draft model makes its K/V of the scored model's hidden states, a token's lie in its own slot. They follow the
same copies. To others SGLang gives all tokens but the first, so a token's K/V lie in the slot of the token before it:

    column             -1       0       1      ...   length - 1
    scored model     t - 1      t     t + 1          newest
    draft model        t      t + 1   t + 2          the one after, which the other model has yet to compute

So the draft model keeps the tokens that the other one keeps, for each layer and head if both have as many, by the same
copies, one column before. What a round then closes up is the same stretch of columns in both models, so the K/V of the
stretch's last column, which belong to the first token after it, move to the column before it.

Column -1 is frozen and not written. So one token of each kept set, the one in column 0, is lost to the draft model,
unless it has been there from the first. The same happens to the first token of each stretch of a row that has been
permuted. Such a loss costs a draft at most: the scored model verifies all of them.
"""

from __future__ import annotations

import torch

from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.pools import PADDING_SLOT


class Follower:
    """Compacts the K/V of one draft model.

    Args:
        mover: moves it.
        layers, heads: the draft model's, as far as this rank holds them.
        ahead: whether a token's K/V lie in the slot of the token before it.
    """

    def __init__(self, mover: Mover, layers: int, heads: int, *, ahead: bool = True) -> None:
        self.mover, self.ahead = mover, ahead
        self._shape = layers, heads

    def follow(
        self,
        slots: torch.Tensor,
        kept: torch.Tensor,
        strategy: str,
        *,
        cut: int | None,
        lengths: torch.Tensor,
        lists: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        """Moves what belongs to the tokens that stay; the host never waits.

        Args:
            slots: [R, N] int32 or int64, private slots of each request in row order, right-padded with valid slots.
            kept: as for `Mover.move`, of the scored model.
            strategy: "remap", "slide" or "fill".
            cut, lengths: as for `list_moves`.
            lists: memory for as many moves as those of the scored model, see `Mover.move`; made where None.

        Raises:
            ValueError: the strategy is unknown.
        """
        if strategy == "remap":
            if self.ahead:
                self._remap(slots, kept, lengths)
            return
        if self._has_sets_like(kept):
            sets = kept
        else:
            sets, lists = one_set(kept), None
        if not self.ahead:
            self.mover.move(slots, sets, strategy, cut=cut, lengths=lengths, lists=lists)
            return
        num_kept = kept.shape[-1]
        place = num_kept if cut is None else cut
        # Nothing comes to column 0 if all before the emptied stretch is empty, and nothing comes from it otherwise.
        first = slots[:, :1] if place == 0 else torch.full_like(slots[:, :1], PADDING_SLOT)
        self.mover.move(torch.cat([first, slots[:, :-1]], 1), sets, strategy, cut=cut, lengths=lengths, lists=lists)
        if place:
            last = slots.gather(1, (lengths - num_kept + place - 1)[:, None])
            self.mover.copy(last, slots[:, place - 1 : place])

    def _remap(self, slots: torch.Tensor, kept: torch.Tensor, lengths: torch.Tensor) -> None:
        """For rows that are permuted, kept is [R, num_kept]: from evicted slots to kept ones, the last one included."""
        kept = kept.long()
        source = torch.cat([kept[:, 1:], lengths[:, None]], 1) - 1
        self.mover.copy(slots.gather(1, source), slots.gather(1, kept))

    def _has_sets_like(self, kept: torch.Tensor) -> bool:
        """Whether each of its layers and heads has a kept set."""
        layers, heads = self._shape
        return kept.ndim == 2 or (kept.shape[-2] == heads and (kept.ndim == 3 or kept.shape[1] == layers))


def one_set(kept: torch.Tensor) -> torch.Tensor:
    """[R, num_kept]: the kept set of each request that all heads of another model follow, whose own have none.

    Any would do, as long as it is one: each slot then holds K/V of one token. It is that of the last layer's first
    head.
    """
    while kept.ndim > 2:
        kept = kept[:, -1] if kept.ndim == 4 else kept[:, 0]
    return kept.contiguous()
