"""Controls that combine the server's value criterion, the distance |v - c| of a value, with something else.

The center c is that of `kernels.score.value_size`. All sums are of logarithms, so they rank by the products:

    look-ups            log |v - c| + w |k_f| + u v         (w, u of `calibration/lookups.py`)
    look-ups-near       the same - DECAY log t              (t is the token's age)
    read-again          log |v - c| + log(s + EPSILON)      (s is what those weights predict)
    oracle              the same with s of later queries    (`foresight.py`)
    value-attention     log |v - c| + log a                 (a is the attention of `snapkv`, from the newest queries)
    value-spans         most log |v - c| of SPAN neighbours (what was written together stays together)
    value-copies        log |v - c|, last if a newer value  (copies of a value need one place)
                        has a cosine above COPY with it
"""

from __future__ import annotations

from typing import cast

import torch

from benchmarks.quality.foresight import LookedUp
from benchmarks.quality.policies import SPAN, Control, SnapKV
from sglang_triattn.calibration.lookups import EPSILON, features
from sglang_triattn.kernels.score.value_size import value_size_torch
from sglang_triattn.stats.query_stats import QueryStats

COPY, DECAY = 0.9, 0.25


class ValueDistance(Control):
    """The size of the server's value criterion alone."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        lengths = torch.tensor([len(slots)], device=slots.device)
        squared = value_size_torch(self.pools.v_buffers, slots[None], lengths, len(slots) - aged)[0]
        return squared.clamp_min(1e-30).log() / 2


class LookUps(ValueDistance):
    """How strongly a key may be looked up, times the value's distance."""

    needs_lookups = True

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return self.strength(slots, next_position) + super().importance(slots, next_position, aged, keep)

    def strength(self, slots: torch.Tensor, next_position: int) -> torch.Tensor:
        """[L, H_kv, N], the logarithm of how strongly a key may be looked up, up to a constant."""
        keys, values = (self.vectors(pool, slots) for pool in (self.pools.k_buffers, self.pools.v_buffers))
        found = features(keys, values, self.row.rope)
        weights = cast(torch.Tensor, cast(QueryStats, self.row.stats).lookups).to(found.device)
        return (found @ weights[..., None])[..., 0]


class LookUpsNear(LookUps):
    """The same, less for older tokens: attention falls off with distance.

    No server can have it: a row does not say how old kept tokens are. Its `recency` goes by their ranks.
    """

    def strength(self, slots: torch.Tensor, next_position: int) -> torch.Tensor:
        age = (next_position - self.positions(slots)).clamp_min(1)
        return super().strength(slots, next_position) - DECAY * age.log()


class ReadAgain(LookUps):
    """The same with what weights would predict: how strongly a key is looked up as the model reads the text again.

    No server can have it: the second reading costs as much as the first, and comes after the whole text.
    """

    needs_lookups = False
    needs_second_reading = True

    def strength(self, slots: torch.Tensor, next_position: int) -> torch.Tensor:
        looked_up = cast(LookedUp, self.row.looked_up).after(next_position).to(slots.device)
        return torch.log(looked_up.gather(-1, self.positions(slots)) + EPSILON)


class Oracle(ReadAgain):
    """The same with what later queries attend to: how much better a choice at this budget could be.

    Of questions, these are their own queries. Of a text, they are those of its dense form, from which the row's own
    text may differ.
    """

    needs_second_reading = False
    needs_foresight = True


class ValueAttention(ValueDistance, SnapKV):
    """The attention of the newest queries, times the value's distance."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        attention = SnapKV.importance(self, slots, next_position, aged, keep)
        return super().importance(slots, next_position, aged, keep) + (attention + EPSILON / len(slots)).log()


class ValueSpans(ValueDistance):
    """Each candidate counts as much as the one of its span whose value is farthest from the center."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        distance = super().importance(slots, next_position, aged, keep)[..., :aged]
        spans = (self.positions(slots[:aged]) - self.row.frozen).clamp_min(0) // SPAN
        most = distance.new_full((*distance.shape[:2], int(spans.max()) + 1), float("-inf"))
        found = most.scatter_reduce(-1, spans, distance, "amax").gather(-1, spans)
        # Within a span that has no room as a whole, a token's own distance decides.
        order = distance.argsort(dim=-1)
        order = order.gather(-1, found.gather(-1, order).argsort(dim=-1, stable=True))
        ranks = torch.arange(aged, device=order.device).expand(order.shape)
        return torch.nn.functional.pad(torch.empty_like(order).scatter(-1, order, ranks), (0, len(slots) - aged))


class ValueCopies(ValueDistance):
    """A candidate whose value comes again in a newer one goes before all others."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        distance = super().importance(slots, next_position, aged, keep)[..., :aged]
        values = torch.nn.functional.normalize(self.vectors(self.pools.v_buffers, slots[:aged]), dim=-1)
        positions = self.positions(slots[:aged])
        newer = positions[..., None, :] > positions[..., :, None]
        copied = ((values @ values.transpose(-1, -2) > COPY) & newer).any(-1)
        return torch.nn.functional.pad(distance - 1e3 * copied, (0, len(slots) - aged))


VALUE_CONTROLS: dict[str, type[Control]] = {
    "look-ups": LookUps,
    "look-ups-near": LookUpsNear,
    "read-again": ReadAgain,
    "oracle": Oracle,
    "value-attention": ValueAttention,
    "value-spans": ValueSpans,
    "value-copies": ValueCopies,
}
