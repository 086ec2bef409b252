"""Policies that decide, outside SGLang, which tokens of a row stay, and what they may read: a scorer, or a control."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.rounds.rules import RoundRules, complete


class CacheError(TriAttentionError):
    """A cache was built or used in a way that cannot work."""


class Policy(Protocol):
    """Decides which private tokens stay. A `kernels.scorer.Scorer` is one."""

    def keep(
        self, slots: torch.Tensor, lengths: torch.Tensor, next_positions: torch.Tensor, num_kept: int, recent: int
    ) -> torch.Tensor:
        """Indices of the private tokens that stay.

        Args:
            slots: [R, N] int64, private slots of each row in row order.
            lengths: [R] int64, private tokens of each row.
            next_positions: [R] int64, logical position of each row's next token.
            num_kept: tokens that stay; the newest `recent` should be among them.

        Returns:
            int64 [R, num_kept], or [R, H_kv, num_kept], or [R, L, H_kv, num_kept]; each set ascending.
        """
        ...


@dataclass(frozen=True, eq=False)
class Pools:
    """What rows hold and a policy may read: one tensor for each of L layers, with S slots.

    Attributes:
        k_buffers: [S, H_kv, head_dim], post-RoPE keys.
        v_buffers: [S, H_kv, head_dim].
        positions: [S, H_kv] int64, the logical position of the token that each head holds there.
    """

    k_buffers: tuple[torch.Tensor, ...]
    v_buffers: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]

    @classmethod
    def empty(
        cls, slots: int, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Pools:
        """Pools of zeros, because masked-out entries must still be numbers."""
        shape = (layers, slots, kv_heads)
        k, v = (torch.zeros(*shape, head_dim, dtype=dtype, device=device) for _ in range(2))
        return cls(k.unbind(), v.unbind(), torch.zeros(shape, dtype=torch.int64, device=device).unbind())

    def all(self) -> Iterator[torch.Tensor]:
        yield from (*self.k_buffers, *self.v_buffers, *self.positions)

    def like(self, slots: int) -> Pools:
        """Empty pools for the same model."""
        k = self.k_buffers[0]
        kv_heads, head_dim = k.shape[1:]
        return Pools.empty(slots, len(self.k_buffers), kv_heads, head_dim, k.dtype, k.device)


@dataclass(frozen=True)
class Setting:
    """How one row is compacted.

    Attributes:
        config: decides when a round runs and how many tokens it keeps.
        make_policy: makes the policy that decides which tokens stay; None means the server's own `Scorer` under
            `config`. It is called when a cache is built, and again for the first round of a branch; rows with equal
            settings share the policy.
        early: tokens by which its first round comes early, as it may in a server that levels rounds.
    """

    config: Config
    make_policy: Callable[[Pools], Policy] | None = None
    early: int = 0

    @cached_property
    def rules(self) -> RoundRules:
        return complete(self.config)
