"""Query statistics and the shape of the model that they belong to: what calibration measures."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.rope import Rope

RECALIBRATE = "make one with `sglang-triattn calibrate`."


class StatsError(TriAttentionError):
    """A statistics file cannot be used; the message is one sentence for the user."""


@dataclass(frozen=True, eq=False)
class ModelShape:
    """Shape of a served or calibrated model, in the terms of a statistics file.

    Attributes:
        layers: the model's numbers of the layers that are scored, ascending.
        fingerprint: `model_fingerprint` of the model; None if it could not be computed, and then it is not compared.
        variant: `model_variant` of the model, by which a launch names what it keeps; a file is not compared by it.
        rotates: for each scored layer, whether RoPE turns its queries and keys; empty stands for all.
        first_position: what a text's first token is turned by; not 0 where SGLang counts positions from 1 (Gemma-4).
        rotary_start: the first dim of a cached key that RoPE turns: 0, or with latent KV the width of the latent, which
            stands before the rotated key.
    """

    layers: tuple[int, ...]
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rope: Rope
    fingerprint: str | None
    rotates: tuple[bool, ...] = ()
    first_position: int = 0
    rotary_start: int = 0
    variant: str = ""

    def __post_init__(self) -> None:
        _fill(self, "rotates", (True,) * len(self.layers))

    @property
    def num_layers(self) -> int:
        """How many layers are scored."""
        return len(self.layers)


@dataclass(frozen=True, eq=False)
class QueryStats:
    """Statistics of pre-RoPE queries per layer and query head; None marks what a file does not store.

    Attributes:
        mean: [L, H_q, F] complex64: mean over tokens of the query's complex components, after any q_norm. In layers
            without RoPE, components of the query itself, paired up in the same way. Where several layers read one KV,
            the mean is over them all.
        abs_mean: [L, H_q, F] float32: mean over tokens of their absolute values; never below |mean|. Of no use in
            layers without RoPE.
        token_count: tokens that the means were taken over.
        source: where the statistics come from, for messages; not stored.
        model: what the model was called where it was measured, a folder or a name; None where that is unknown.
        layers, rotates, rotary_start: as in `ModelShape`; empty `layers` stand for 0 to L - 1.
        unrotated_mean: [L, H_q, head_dim - 2F] float32: mean query in the dims that RoPE does not turn, which may be
            none; with latent KV, as the query meets the latent (W_uk^T q). None in files of version 1 and published
            ones.
        lookups: [L, H_kv, F + v_head_dim] float32: weights that predict from the sizes of a key's complex components
            and from the value how strongly later tokens may look them up (`kernels.score.value_size.LookUps`); None
            where none were fitted.
    """

    mean: torch.Tensor
    abs_mean: torch.Tensor
    num_kv_heads: int | None
    head_dim: int
    rope: Rope | None
    fingerprint: str | None
    token_count: int | None
    source: str
    layers: tuple[int, ...] = ()
    rotates: tuple[bool, ...] = ()
    unrotated_mean: torch.Tensor | None = None
    rotary_start: int = 0
    model: str | None = None
    lookups: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _fill(self, "layers", tuple(range(len(self.mean))))
        _fill(self, "rotates", (True,) * len(self.layers))

    @property
    def scored_dims(self) -> int:
        """Dims of a head that scores take into account: all, or those that RoPE turns."""
        return 2 * self.mean.shape[-1] if self.unrotated_mean is None else self.head_dim

    def of_layers(self, layers: Sequence[int]) -> "QueryStats":
        """The statistics of some of the layers, by their numbers in the model."""
        places = [self.layers.index(layer) for layer in layers]
        return replace(
            self,
            mean=self.mean[places],
            abs_mean=self.abs_mean[places],
            layers=tuple(layers),
            rotates=tuple(self.rotates[place] for place in places),
            unrotated_mean=None if self.unrotated_mean is None else self.unrotated_mean[places],
            lookups=None if self.lookups is None else self.lookups[places],
        )


def _fill(frozen: Any, name: str, usual: tuple) -> None:
    """Sets an empty field of a frozen dataclass."""
    if not getattr(frozen, name):
        object.__setattr__(frozen, name, usual)
