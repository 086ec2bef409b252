"""How much device memory a `Scorer` holds and how much it scores in one launch: arithmetic on a model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang_triattn.kernels.score.reference import CHUNK
from sglang_triattn.kernels.score.tables import OFFSETS
from sglang_triattn.kernels.select import selection_named

_ALIGNMENT = 256

LIMIT_BYTES = 64 << 20
"""Device memory that a `Scorer` holds, unless a single request needs more."""


@dataclass(frozen=True)
class WorkspacePlan:
    """Device memory of a `Scorer`, known before the first request.

    Args:
        layers, q_heads, kv_heads, frequencies: the model's.
        num_tokens: most private tokens of a request that is scored in one launch for all layers.
        longest: most private tokens that any request can have. One with more than `num_tokens` may take several
            launches of some layers each.
        limit: bytes to hold; exceeded only if one of those two needs more.
        selection, aggregation, value_share: as for `select_torch` and `score_torch`.
    """

    layers: int
    q_heads: int
    kv_heads: int
    frequencies: int
    num_tokens: int
    longest: int
    limit: int = LIMIT_BYTES
    selection: str = "union"
    aggregation: str = "mean"
    value_share: float = 0.0

    def parts(self, requests: int, num_tokens: int, layers: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the float32 tensors for `layers` layers of `requests` rows of `num_tokens` tokens each.

        Importance comes first: it stays where it is while groups of layers, not all equal in size, add to it. Only what
        decides is included: no scores if `value_share` is 1, no value sizes if it is 0.
        """
        sizes = {"sizes": (requests, layers, self.kv_heads, num_tokens)} if self.value_share else {}
        if self.value_share == 1:
            return sizes
        sets = selection_named(self.selection).sets(layers, self.kv_heads)
        rows = (requests, layers, self.q_heads)
        return {
            "importance": (requests, sets, num_tokens),
            "phases": (requests, len(OFFSETS) if self.aggregation == "max" else 1, 2, self.frequencies),
            "scores": (*rows, num_tokens),
            "moments": (*rows, -(-num_tokens // CHUNK), 2),
            "scales": (*rows, 2),
            **sizes,
        }

    def needs(self, requests: int, num_tokens: int, layers: int) -> int:
        """Bytes that `parts` take up."""
        return sum(padded_bytes(shape) for shape in self.parts(requests, num_tokens, layers).values())

    def bytes(self) -> int:
        """Bytes held throughout, independent of the requests."""
        least = max(self.needs(1, self.num_tokens, self.layers), self.needs(1, self.longest, 1))
        return max(self.limit // _ALIGNMENT * _ALIGNMENT, least)

    def launch(self, num_tokens: int) -> tuple[int, int]:
        """(requests, layers) to score at once if rows have `num_tokens` tokens.

        Depends only on the width of the rows, which is that of the widest request. Narrower requests are unaffected:
        their results have the same bits however the layers are split.

        Raises:
            ValueError: one layer of one request does not fit.
        """
        total = self.bytes()
        layers = next((n for n in range(self.layers, 0, -1) if self.needs(1, num_tokens, n) <= total), 0)
        if not layers:
            raise ValueError(
                f"a row of {num_tokens} tokens exceeds the {max(self.num_tokens, self.longest)} planned for"
            )
        if layers < self.layers:
            # Launches of about equal size.
            return 1, -(-self.layers // -(-self.layers // layers))
        requests = total // self.needs(1, num_tokens, layers)
        # The parts of several requests pack more tightly than those of one.
        while self.needs(requests + 1, num_tokens, layers) <= total:
            requests += 1
        return requests, layers


def padded_bytes(shape: tuple[int, ...]) -> int:
    """Bytes of a float32 tensor, rounded up so that the next one is aligned."""
    return -(-torch.Size(shape).numel() * 4 // _ALIGNMENT) * _ALIGNMENT
