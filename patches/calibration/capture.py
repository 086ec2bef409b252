"""Takes the queries of a forward pass where they reach SGLang's attention layers, and adds them to the sums.

SGLang part: `RadixAttention` (sglang/srt/layers/radix_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.calibration.query_sums import QuerySums
from sglang_triattn.patches.model.layers import AttentionLayer, Call, numbers_of, watching_queries


@contextmanager
def capture(
    layers: Sequence[AttentionLayer], sums: QuerySums, positions_of_pass: Callable[[], torch.Tensor]
) -> Iterator[None]:
    """While open, adds the queries that reach each of `layers` to `sums`.

    Args:
        positions_of_pass: returns what the tokens of the pass that runs are turned by, [tokens].
    """
    numbers = numbers_of(layers)

    def see(place: int, call: Call) -> None:
        check_final(call)
        positions = positions_of_pass()[: call.query.shape[0]]
        index = numbers.index(layers[place].number)
        if call.latent is None:
            sums.add(index, call.heads(len(positions)), positions)
        else:
            parts = call.parts(len(positions))
            sums.add_latent(index, parts.turning, positions, parts.still, absorbed=parts.absorbed)

    with watching_queries(layers, see):
        yield


def check_final(call: Call) -> None:
    """Raises CalibrationError unless the queries of a call are what meets the cached keys."""
    reason = call.unfinished()
    if reason is not None:
        raise CalibrationError(
            f"The queries of layer {call.attention.layer_id} cannot be measured, because they reach SGLang's "
            f"attention {reason} and become final only within its backend: calibrate with another "
            "--attention-backend or --kv-cache-dtype, and serve with that statistics file."
        )


def absorb_in(layers: Sequence[AttentionLayer]) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """`absorb` of `QuerySums`, called for layers with latent KV alone; of these, none reads the KV of another."""

    def absorb(index: int, query: torch.Tensor) -> torch.Tensor:
        latent = layers[index].latent
        assert latent is not None
        return latent.absorb(query)

    return absorb
