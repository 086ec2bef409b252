"""Fits the weights of look-ups inside a scheduler, as `calibration.lookups` defines them.

Both readings of a text are one prefill, so that keys, values and queries are those of one call of each layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.calibration.lookups import LookupSums, Measured, Reading
from sglang_triattn.patches.calibration.capture import check_final
from sglang_triattn.patches.model.eager_batch import EagerBatch
from sglang_triattn.patches.model.layers import AttentionLayer, Call, numbers_of, watching_queries
from sglang_triattn.patches.ranks.pipeline import is_staged
from sglang_triattn.stats.file import ModelShape

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler

MIN_WINDOW = 256
"""Fewest tokens that a text may be cut to: shorter ones leave little to look up."""


def text_length(job: CalibrationJob, room: int) -> int:
    """Most tokens of a text for look-ups, whose two readings are one prefill of at most `room` tokens.

    Raises:
        CalibrationError: that would be too few.
    """
    length = (room - len(job.lookup_request)) // 2
    if length < min(MIN_WINDOW, max(map(len, job.lookup_texts), default=0)):
        raise CalibrationError(
            f"Look-ups need texts of {MIN_WINDOW} tokens, read twice in one prefill, but the server has room for "
            f"{room} tokens: raise --chunked-prefill-size, --context-length or --max-total-tokens."
        )
    return length


def fit_lookups(
    scheduler: Scheduler,
    job: CalibrationJob,
    layers: Sequence[AttentionLayer],
    shape: ModelShape,
    length: int,
    on_text: Callable[[int], object],
) -> torch.Tensor:
    """The weights [L, H_kv, F + v_head_dim] float32 of all layers and KV heads of the served model, on the CPU.

    Call it on every rank of every stage.

    Args:
        layers: this stage's scored ones, and those that read their KV.
        length: what longer texts are cut to, see `text_length`.
        on_text: called after each text with the number of tokens that were read.

    Raises:
        CalibrationError: a layer's queries, keys or values do not show, or weights are not finite.
    """
    group = scheduler.dp_tp_group
    copies = max(1, group.world_size * layers[0].heads[1] // shape.num_kv_heads)
    sums = LookupSums(shape.rope)
    for text in job.lookup_texts:
        ids = text[:length]
        measured = _read_again(scheduler, layers, ids, job.lookup_request)
        if copies > 1:
            most = most_of_copies(group.all_gather_object(measured.most.cpu()), copies)[group.rank_in_group]
            measured = Measured(measured.keys, measured.values, most.to(measured.most.device))
        sums.add(measured)
        on_text(job.tokens_of_lookups(text))
    weights = torch.cat(group.all_gather_object(sums.weights())[::copies], dim=1)
    return torch.cat(scheduler.pp_group.all_gather_object(weights)) if is_staged(scheduler) else weights


def most_of_copies(parts: Sequence[torch.Tensor], copies: int) -> list[torch.Tensor]:
    """`Measured.most` of each rank by the query heads of all ranks that have a copy of its KV head.

    Args:
        parts: [L, 1, n] of each rank by its own query heads; ranks with the same KV head follow one another.
    """
    whole = torch.stack(list(parts)).unflatten(0, (-1, copies)).amax(1)
    return [*whole.repeat_interleave(copies, dim=0)]


def _read_again(
    scheduler: Scheduler, layers: Sequence[AttentionLayer], ids: Sequence[int], request: Sequence[int]
) -> Measured:
    both, reading = [*ids, *request, *ids], Reading(len(ids))

    def see(_: int, call: Call) -> None:
        check_final(call)
        attention = call.attention
        reading.see(attention.layer_id, call.heads(len(both)), attention.scaling, call.kv(len(both)))

    batch = EagerBatch(scheduler, [both])
    try:
        with watching_queries(layers, see):
            batch.prefill()
    finally:
        batch.close()
    return reading.measured(numbers_of(layers))
