"""How each attention layer turns its queries: seen in a forward pass, not taken from the model's code.

A text of one token attends to that token alone, so what enters a layer does not depend on where the token stands. The
same token is run at two positions. What lies between the two queries of a layer is its rotation, which must be that of
one of the model's rotary embeddings, or none (NoPE). So a layer is never scored by frequencies that it does not use:
not where a model leaves RoPE out of some layers, norms after it, or holds an embedding that it does not apply.
With latent KV, the part of a query that meets rotated keys is compared, and the other part must stay as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from sglang_triattn.model.rope import Rope, rotate, same_rope
from sglang_triattn.patches.model.eager_batch import EagerBatch, eager, on_forward_stream
from sglang_triattn.patches.model.layers import (
    AttentionLayer,
    Call,
    UnsupportedModel,
    watching_positions,
    watching_queries,
)

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler

POSITION = 997
"""Where the second token stands, or at the end of a shorter context: far enough for wrong frequencies to show."""

Queries = tuple[torch.Tensor, torch.Tensor]
"""The queries [H_q, D] of one token in one layer, at position 0 and farther on; of latent KV, what RoPE may turn."""

TOLERANCE = 0.05
"""Largest relative difference between a query and the predicted one: 16-bit arithmetic stays well below."""


@dataclass(frozen=True, eq=False)
class Rotation:
    """
    Attributes:
        rope: the rotation in all layers that rotate their queries.
        rotates: whether a layer does, for each that is scored.
        first_position: what a text's first token is turned by.
    """

    rope: Rope
    rotates: tuple[bool, ...]
    first_position: int = 0


def match_rotation(
    seen: Sequence[Queries | None],
    layers: Sequence[int],
    ropes: Sequence[Rope],
    position: int,
) -> Rotation:
    """Finds the rotation that lies between the queries of each layer.

    Args:
        seen: of each layer, the token's queries at position 0 and at `position`; None where a backend finishes them
            out of sight. Such a model is believed if it has only one rotary embedding.
        layers: numbers of the layers; layers that read one KV have one number.
        ropes: the model's rotary embeddings.

    Raises:
        UnsupportedModel: a layer turns its queries otherwise, or unlike another layer, or none turns them.
    """
    found: Rope | None = None
    rotates: dict[int, bool] = {}
    for number, pair in zip(layers, seen, strict=True):
        if pair is None:
            if len(ropes) != 1:
                raise UnsupportedModel(f"its attention layer {number} turns its queries within the attention backend")
            rope: Rope | None = ropes[0]
        elif _fits(pair[1], pair[0]):
            rope = None
        else:
            rope = next((rope for rope in ropes if _fits(pair[1], _turned(pair[0], position, rope))), None)
            if rope is None:
                raise UnsupportedModel(f"its attention layer {number} turns its queries in an unknown way")
        if rope is not None and found is not None and not same_rope(rope, found):
            raise UnsupportedModel(f"layer {number} has another rotary embedding than the layers before")
        found = found or rope
        if rotates.setdefault(number, rope is not None) != (rope is not None):
            raise UnsupportedModel(f"not all layers that read the KV of layer {number} rotate their queries")
    if found is None:
        found = _unused(ropes)
    return Rotation(found, tuple(rotates.values()))


def _unused(ropes: Sequence[Rope]) -> Rope:
    """The embedding of the layers that are not scored, where none that is scored rotates: it only pairs up dims."""
    if not ropes:
        raise UnsupportedModel("its attention has no rotary embedding")
    return ropes[0]


def queries_at(
    scheduler: Scheduler, layers: Sequence[AttentionLayer], position: int
) -> tuple[list[Queries | None], int]:
    """`seen` of `match_rotation`, on the CPU in float64, and the position that a text's first token is turned by."""
    seen: list[list[torch.Tensor]] = [[] for _ in layers]
    still: list[list[torch.Tensor]] = [[] for _ in layers]
    turned: list[int] = []
    model = scheduler.tp_worker.model_runner.model

    def see(place: int, call: Call) -> None:
        if call.unfinished() is not None:
            return
        if call.latent is None:
            seen[place].append(call.heads(1)[:, 0].double().cpu())
        else:
            parts = call.parts(1)
            seen[place].append(parts.turning[:, 0].double().cpu())
            still[place].append(parts.still[:, 0].double().cpu())

    token = scheduler.model_config.vocab_size // 2
    with (
        on_forward_stream(scheduler),
        eager(scheduler.tp_worker.model_runner),
        watching_queries(layers, see),
        watching_positions(model, lambda positions: turned.append(int(positions.flatten()[0]) - place)),
    ):
        # One after the other: with --max-running-requests 1 there is one row.
        for place in (0, position):
            batch = EagerBatch(scheduler, [[token]])
            try:
                batch.prefill([place])
            finally:
                batch.close()
    if len(set(turned)) > 1:
        raise UnsupportedModel("its layers turn a token by different positions")
    for layer, queries in zip(layers, still, strict=True):
        if queries and not _fits(queries[1], queries[0]):
            raise UnsupportedModel(
                f"what its attention layer {layer.number} compares with latents depends on positions"
            )
    # A backend that turns queries itself does it by the positions that it is given.
    return [(queries[0], queries[1]) if queries else None for queries in seen], turned[0] if turned else 0


def _fits(query: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((query - expected).norm() <= TOLERANCE * query.norm())


def _turned(query: torch.Tensor, position: int, rope: Rope) -> torch.Tensor:
    """What becomes at `position` of a query [H_q, D] at position 0, where it is already scaled."""
    unscaled = replace(rope, attention_scaling=1.0)
    return rotate(query[:, None], torch.tensor([position]), unscaled)[:, 0]
