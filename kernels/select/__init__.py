"""Which tokens stay: the reference in torch, kernels in Triton. The names defined here need neither."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Selection:
    """How the scores of all layers and query heads become kept sets.

    Attributes:
        name: the value of --triattention-selection.
        merge: how rows of scores become one: the "max" or the "mean" of all of them, or "grouped": the max over the
            query heads of a KV head, then the mean over the layers that share a set.
        shared: all layers and heads keep one set.
        per_layer: each layer keeps sets of its own, so values can choose a share of them.
    """

    name: str
    merge: Literal["max", "mean", "grouped"]
    shared: bool = False
    per_layer: bool = False

    def sets(self, layers: int, kv_heads: int) -> int:
        """Kept sets of one request."""
        return 1 if self.shared else kv_heads * (layers if self.per_layer else 1)


_ALL = (
    Selection("shared-mean", "mean", shared=True),
    Selection("union", "max", shared=True),
    Selection("per-head", "grouped"),
    Selection("per-layer-head", "grouped", per_layer=True),
)
_BY_NAME = {selection.name: selection for selection in _ALL}
SELECTIONS = tuple(_BY_NAME)


def selection_named(name: str) -> Selection:
    """Raises ValueError if there is none of that name."""
    if name not in _BY_NAME:
        raise ValueError(f"selection must be one of {SELECTIONS}, got {name!r}")
    return _BY_NAME[name]
