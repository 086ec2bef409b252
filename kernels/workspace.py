"""How much device memory a `Scorer` holds and how much it does in one launch: arithmetic on a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.select import selection_named

_ALIGNMENT = 256

LIMIT_BYTES = 128 << 20
"""Device memory that a `Scorer` holds, unless a single request needs more."""


@dataclass(frozen=True)
class WorkspacePlan:
    """Device memory of a `Scorer`, known before the first request: all that a round holds between reading keys and
    moving K/V, but for some bytes per private token and request.

    Args:
        layers, q_heads, kv_heads: the model's.
        num_tokens: most private tokens of a request that is scored in one launch for all layers.
        longest: most private tokens that any request can have. One with more than `num_tokens` may take several
            launches of some layers each.
        limit: bytes to hold; exceeded only if one of those two needs more.
        selection, value_share: as for `select_torch`.
        most_kept: most private tokens of a request that stay; None for as many as it has.
    """

    layers: int
    q_heads: int
    kv_heads: int
    num_tokens: int
    longest: int
    limit: int = LIMIT_BYTES
    selection: str = "union"
    value_share: float = 0.0
    most_kept: int | None = None

    def parts(
        self, requests: int, num_tokens: int, layers: int, num_kept: int = 0, moves: int = 0
    ) -> dict[str, tuple[int, tuple[int, ...]]]:
        """First byte and shape of each tensor for `layers` layers of `requests` rows of `num_tokens` tokens each.

        All have elements of 4 bytes. Kept sets and importance stay while groups of layers, not all equal in size, are
        scored. The rest comes in three groups, one after the other in the same memory: scores; value sizes, once
        importance is known; the lists of moves, once all sets are. Only what decides is included: no scores if
        `value_share` is 1, no value sizes if it is 0.

        Args:
            num_kept: tokens that stay of each row.
            moves: most moves of each kept set.
        """
        chosen = selection_named(self.selection)
        sets = chosen.sets(self.layers, self.kv_heads)
        rows = (requests, layers, self.q_heads)
        held: dict[str, tuple[int, ...]] = {"kept": (requests, sets, num_kept)}
        scored: dict[str, tuple[int, ...]] = {}
        if self.value_share != 1:
            held["importance"] = (requests, chosen.sets(layers, self.kv_heads), num_tokens)
            scored["scores"] = (*rows, num_tokens)
            scored["moments"] = (*rows, -(-num_tokens // CHUNK), 2)
            scored["scales"] = (*rows, 2)
        sized: dict[str, tuple[int, ...]] = {}
        if self.value_share:
            sized["sizes"] = (requests, layers, self.kv_heads, num_tokens)
        moved: dict[str, tuple[int, ...]] = dict.fromkeys(("sources", "targets"), (requests, sets, moves))
        places, start = _placed(held, 0)
        for group in (scored, sized, moved):
            places |= _placed(group, start)[0]
        return places

    def needs(self, requests: int, num_tokens: int, layers: int, num_kept: int = 0, moves: int = 0) -> int:
        """Bytes that `parts` take up."""
        parts = self.parts(requests, num_tokens, layers, num_kept, moves)
        return max(start + padded_bytes(shape) for start, shape in parts.values())

    def bytes(self) -> int:
        """Bytes held throughout, independent of the requests."""
        least = max(self._most(self.num_tokens, self.layers), self._most(self.longest, 1))
        return max(self.limit // _ALIGNMENT * _ALIGNMENT, least)

    def _most(self, num_tokens: int, layers: int) -> int:
        """Most bytes for `layers` layers of one row, however it is compacted."""
        num_kept = num_tokens if self.most_kept is None else min(self.most_kept, num_tokens)
        return self.needs(1, num_tokens, layers, num_kept, num_kept)

    def launch(self, num_tokens: int, num_kept: int = 0, moves: int = 0) -> tuple[int, int]:
        """(requests, layers) to score at once if rows have `num_tokens` tokens.

        Depends only on the width of the rows, which is that of the widest request, and on what they keep and move.
        Narrower requests are unaffected: their results have the same bits however the layers are split.

        Raises:
            ValueError: one layer of one request does not fit.
        """
        total, rest = self.bytes(), (num_kept, moves)
        layers = next((n for n in range(self.layers, 0, -1) if self.needs(1, num_tokens, n, *rest) <= total), 0)
        if not layers:
            raise ValueError(
                f"a row of {num_tokens} tokens, {num_kept} of which stay, exceeds the "
                f"{max(self.num_tokens, self.longest)} planned for"
            )
        if layers < self.layers:
            # Launches of about equal size.
            return 1, -(-self.layers // -(-self.layers // layers))
        requests = total // self.needs(1, num_tokens, layers, *rest)
        # The parts of several requests pack more tightly than those of one.
        while self.needs(requests + 1, num_tokens, layers, *rest) <= total:
            requests += 1
        return requests, layers


def _placed(shapes: dict[str, tuple[int, ...]], start: int) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """`shapes` with their first bytes, one after the other from `start` on, and the first byte after them."""
    places = {}
    for name, shape in shapes.items():
        places[name] = (start, shape)
        start += padded_bytes(shape)
    return places, start


def padded_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a tensor with elements of 4 bytes, rounded up so that the next one is aligned."""
    return -(-torch.Size(shape).numel() * 4 // _ALIGNMENT) * _ALIGNMENT
