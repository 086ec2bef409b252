"""Controls: cheap or well-known ways to choose the tokens that stay, for the rounds of `CompactedCache`.

Each follows the rules of the server's own settings: the prompt and the newest `recent` tokens stay, the rest of the
budget goes to the highest importance, and what is evicted does not come back. With k and v a token's key and value in
one head:

    newest              its position                            (arXiv 2309.17453; the prompt holds the sinks)
    random              drawn once for life, per layer and head (Random Attention, arXiv 2609.03430)
    random-shared       drawn once for life, one set for all heads
    random-spans        the same for spans of 16 neighbours
    key-norm            -|k|                                    (arXiv 2406.11430)
    value-norm          |v|
    snapkv              attention of the newest queries         (arXiv 2404.14469)
    expected-attention  attention expected of future queries    (arXiv 2510.00636, as kvpress defines it)
    r-kv                attention of the newest queries, less   (arXiv 2505.24133, in its plainest reading)
                        how similar a key is to other keys
    value-range         max(v) - min(v) for a quarter,          (VaSE, arXiv 2606.03928, in its plainest reading)
                        drawn for the rest

`redrawn.py` has those that draw anew at every round, `value_policies.py` those that combine the server's value
criterion with another.

A priority that is drawn once, for life, makes the kept tokens a uniform sample of all tokens older than `recent`: a
token that once lost against k others stays lost, as if all had been compared at the end.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.quality.foresight import LookedUp
from benchmarks.quality.queries import QueryLog
from sglang_triattn.kernels.select.reference import keep_torch
from sglang_triattn.model.rope import Rope, rotate
from sglang_triattn.stats.query_stats import QueryStats
from sglang_triattn.transformers_cache.policy import Pools

SPAN = 16
WINDOW, POOLING = 64, 5
"""Number of observed queries and width of the pooling: the defaults of kvpress's SnapKV."""
OBSERVED, IMPORTANCE = 8, 0.1
"""R-KV's number of observed queries, and the weight of their attention against redundancy."""
SINKS, FUTURE = 4, 512
"""First tokens excluded from the statistics, and positions to look ahead: the defaults of kvpress."""


@dataclass(frozen=True)
class RowFacts:
    """What a policy knows about its row, in addition to the pools.

    Attributes:
        seed: for random choices; the same at every budget, so that a smaller sample lies within a larger one.
        tokens: tokens that the row will have seen in the end.
        frozen: first entry of the row that a round may touch.
        rope: the model's.
        queries: queries of the row's tokens; None unless the policy `needs_queries`.
        stats: the model's; None unless a choice needs them.
        looked_up: how strongly each token is looked up at most: as the model reads the row's text again if the policy
            `needs_second_reading`, by later queries if it `needs_foresight`, else None.
    """

    seed: str
    tokens: int
    frozen: int
    rope: Rope
    queries: QueryLog | None = None
    stats: QueryStats | None = None
    looked_up: LookedUp | None = None


class Control(ABC):
    """A policy by importance, which subclasses define; what they say about the newest `recent` tokens is ignored."""

    needs_queries = False
    needs_lookups = False
    needs_second_reading = False
    needs_foresight = False

    def __init__(self, pools: Pools, row: RowFacts) -> None:
        self.pools, self.row = pools, row

    def keep(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, num_kept: int, recent: int
    ) -> torch.Tensor:
        """See `sglang_triattn.transformers_cache.policy.Policy`; handles one row at a time."""
        aged = slots.shape[1] - recent
        importance = self.importance(slots[0], int(next_positions[0]), aged, num_kept).float().clone()
        importance[..., aged:] = float("-inf")
        return keep_torch(importance[None], lengths, num_kept, recent)

    @abstractmethod
    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        """[N] or [L, H_kv, N] for private tokens at `slots` [N]; the first `aged` of them compete."""

    def positions(self, slots: torch.Tensor) -> torch.Tensor:
        """[L, H_kv, N] int64: logical positions of the tokens that each head holds."""
        return torch.stack([layer[slots].T for layer in self.pools.positions])

    def vectors(self, buffers: Sequence[torch.Tensor], slots: torch.Tensor) -> torch.Tensor:
        """Keys or values, float32 [L, H_kv, N, head_dim]."""
        return torch.stack([layer[slots].transpose(0, 1).float() for layer in buffers])

    def whole_row(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of the frozen and the private entries; a row is contiguous."""
        first = int(slots[0]) - self.row.frozen
        return torch.arange(first, first + self.row.frozen + len(slots), device=slots.device)

    def priorities(self, *shape: int) -> torch.Tensor:
        """Uniform in [0, 1), the same whenever this row's policy is built."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.row.seed.encode()))
        return torch.rand(*shape, generator=generator).to(self.pools.k_buffers[0].device)


class Newest(Control):
    """A sliding window after the prompt."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return torch.arange(len(slots), device=slots.device)


class Random(Control):
    """A uniform sample of the history for each head of each layer."""

    def __init__(self, pools: Pools, row: RowFacts) -> None:
        super().__init__(pools, row)
        self.drawn = self.priorities(len(pools.k_buffers), pools.k_buffers[0].shape[1], row.tokens)

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return self.drawn.gather(-1, self.positions(slots))


class RandomShared(Control):
    """One uniform sample of the history for all heads."""

    span = 1

    def __init__(self, pools: Pools, row: RowFacts) -> None:
        super().__init__(pools, row)
        self.drawn = self.priorities(row.tokens // self.span + 1)

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return self.drawn[(self.pools.positions[0][slots, 0] - self.row.frozen) // self.span]


class RandomSpans(RandomShared):
    """Spans of SPAN neighbours that stay or go as a whole, except the last one, whose older tokens stay."""

    span = SPAN


class KeyNorm(Control):
    """Small keys stay: they tend to be the ones that are attended to."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return -self.vectors(self.pools.k_buffers, slots).norm(dim=-1)


class ValueNorm(Control):
    """Large values stay."""

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        return self.vectors(self.pools.v_buffers, slots).norm(dim=-1)


class ValueRange(Random):
    """Protects a quarter of the budget by the range of a value's components; the rest is a random sample.

    VaSE is "value-aware stochastic eviction"; this is the plainest reading of its name and of "protect the K/4 tokens
    with the largest range of values", not its authors' code.
    """

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        values = self.vectors(self.pools.v_buffers, slots[:aged])
        spread = values.amax(-1) - values.amin(-1)
        importance = super().importance(slots, next_position, aged, keep)
        protected = spread.topk(min(keep // 4, aged)).indices
        return importance.scatter_add(-1, protected, torch.ones_like(importance))


class SnapKV(Control):
    """Mean attention of the newest WINDOW queries, averaged over POOLING neighbours and then over a KV head's queries.

    Recomputed at every round over what is left; the paper does it once, at the end of a prompt.
    """

    needs_queries = True
    window = WINDOW

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        found, row = [], self.whole_row(slots)
        start = max(0, next_position - self.window)
        asked = torch.arange(start, next_position, device=slots.device)
        for layer, (keys, positions) in enumerate(zip(self.pools.k_buffers, self.pools.positions, strict=True)):
            queries = self.row.queries.after_rope(layer, start, next_position).unflatten(0, (keys.shape[1], -1))
            logits = torch.einsum("hgwd,nhd->hgwn", queries, keys[row].float()) * keys.shape[-1] ** -0.5
            unseen = positions[row].T[:, None, None, :] > asked[:, None]
            attention = logits.masked_fill_(unseen, float("-inf")).softmax(-1)[..., self.row.frozen :].mean(2)
            pooled = torch.nn.functional.avg_pool1d(attention, POOLING, stride=1, padding=POOLING // 2)
            found.append(pooled.mean(1))
        return torch.stack(found)


class RKV(SnapKV):
    """IMPORTANCE times the pooled attention of the newest OBSERVED queries, less the rest times redundancy.

    Redundancy is the mean cosine of a key with the other private keys that compete, as a softmax over them; attention
    is divided by its sum. The paper also spares the newest of near duplicates, which `recent` does here in part.
    """

    window = OBSERVED

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        attention = super().importance(slots, next_position, aged, keep)[..., :aged]
        keys = torch.nn.functional.normalize(self.vectors(self.pools.k_buffers, slots[:aged]), dim=-1)
        # Sum of cosines with all keys, without the one with itself.
        cosines = ((keys * keys.sum(-2, keepdim=True)).sum(-1) - 1) / max(aged - 1, 1)
        attention = attention / attention.sum(-1, keepdim=True).clamp_min(1e-12)
        mixed = IMPORTANCE * attention - (1 - IMPORTANCE) * cosines.softmax(-1)
        return torch.nn.functional.pad(mixed, (0, len(slots) - aged))


class ExpectedAttention(Control):
    """Softmax of the expected logit of a Gaussian query at the next FUTURE positions, times the norm of the value.

    With mean m and covariance C of the row's queries before RoPE, and R the mean rotation over those positions:
    k R m / sqrt(d) + k R C R' k' / 2d, softmax over the row without its sinks, mean over a KV head's queries, times
    |v|. The statistics are over all tokens so far except the sinks, as kvpress takes them over the prompt.
    """

    needs_queries = True

    def importance(self, slots: torch.Tensor, next_position: int, aged: int, keep: int) -> torch.Tensor:
        found, sinks = [], min(SINKS, self.row.frozen)
        row = self.whole_row(slots)[sinks:]
        turn = self._mean_rotation(next_position)
        for layer, (keys, values) in enumerate(zip(self.pools.k_buffers, self.pools.v_buffers, strict=True)):
            queries = self.row.queries.before_rope(layer, sinks, next_position)  # [H_q, n, d]
            mean = queries.mean(1)
            centred = queries - mean[:, None]
            covariance = centred.transpose(1, 2) @ centred / centred.shape[1]
            mean, covariance = mean @ turn.T, turn @ covariance @ turn.T
            heads, size = keys.shape[1:]
            k = keys[row].float().transpose(0, 1)[:, None]  # [H_kv, 1, N, d]
            mean, covariance = (x.unflatten(0, (heads, -1)) for x in (mean, covariance))
            logits = (k @ mean[..., None])[..., 0] / size**0.5 + ((k @ covariance) * k).sum(-1) / (2 * size)
            attention = logits.softmax(-1).mean(1) * values[row].float().norm(dim=-1).T
            found.append(attention[:, self.row.frozen - sinks :])
        return torch.stack(found)

    def _mean_rotation(self, start: int) -> torch.Tensor:
        """[d, d] float32: rotates a column vector by the mean of RoPE over the next FUTURE positions."""
        size = self.pools.k_buffers[0].shape[-1]
        axes = torch.eye(size, device=self.pools.k_buffers[0].device)
        ahead = torch.arange(start, start + FUTURE, device=axes.device)
        return rotate(axes[:, None].expand(-1, FUTURE, -1), ahead, self.row.rope).mean(1).T


CONTROLS: dict[str, type[Control]] = {
    "newest": Newest,
    "random": Random,
    "random-shared": RandomShared,
    "random-spans": RandomSpans,
    "key-norm": KeyNorm,
    "value-norm": ValueNorm,
    "snapkv": SnapKV,
    "expected-attention": ExpectedAttention,
    "r-kv": RKV,
    "value-range": ValueRange,
}
