"""What policies based on attention need: the queries of a row's own tokens, before RoPE rotated them.

Queries are captured where transformers hands them to its attention function, as in calibration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from sglang_triattn.model.rope import Rope, rotate, unrotate
from sglang_triattn.transformers_cache.queries import watching_queries


class QueryLog:
    """The queries of all tokens of one row so far; a token's number is its position."""

    def __init__(self, layers: int, rope: Rope) -> None:
        self.rope = rope
        self._parts: list[list[torch.Tensor]] = [[] for _ in range(layers)]
        self._counts = [0] * layers

    def add(self, layer: int, queries: torch.Tensor) -> None:
        """Appends post-RoPE queries [H_q, S, head_dim] of the next S tokens."""
        start = self._counts[layer]
        positions = torch.arange(start, start + queries.shape[1], device=queries.device)
        self._parts[layer].append(unrotate(queries.float(), positions, self.rope))
        self._counts[layer] += queries.shape[1]

    def before_rope(self, layer: int, start: int, until: int) -> torch.Tensor:
        """float32 [H_q, until - start, head_dim] for tokens `start` to `until` - 1."""
        parts = self._parts[layer]
        if len(parts) > 1:
            parts[:] = [torch.cat(parts, dim=1)]
        return parts[0][:, start:until]

    def after_rope(self, layer: int, start: int, until: int) -> torch.Tensor:
        """The same, rotated to the tokens' own positions."""
        queries = self.before_rope(layer, start, until)
        return rotate(queries, torch.arange(start, until, device=queries.device), self.rope)

    def keep_first(self, count: int) -> None:
        """Forgets all but the first `count` tokens: padding, and rejected drafts."""
        for layer, parts in enumerate(self._parts):
            parts[:] = [torch.cat(parts, dim=1)[:, :count]]
            self._counts[layer] = parts[0].shape[1]

    def copy(self) -> QueryLog:
        """A log of the same tokens, to be continued on its own."""
        other = QueryLog(len(self._parts), self.rope)
        other._parts, other._counts = [list(parts) for parts in self._parts], list(self._counts)
        return other

    def forget(self) -> None:
        """Frees the memory; nothing can be asked for afterwards."""
        self._parts = [[] for _ in self._parts]


@contextmanager
def recording(logs: Mapping[int, QueryLog]) -> Iterator[None]:
    """While open, adds the queries of every attention call of transformers models to the logs: row -> its log."""
    if not logs:
        yield
        return

    def add(layer: int, query: torch.Tensor) -> None:
        for row, log in logs.items():
            log.add(layer, query[row])

    with watching_queries(add):
        yield
