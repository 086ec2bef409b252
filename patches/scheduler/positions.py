"""Logical positions of computed and sampled tokens.

SGLang parts: `ForwardBatch.init_new` (sglang/srt/model_executor/forward_batch_info.py), `ModelRunner.sample`
(sglang/srt/model_executor/model_runner.py).

SGLang takes a token's RoPE position from its place in the request's row, which a compaction round shortens. In decode
the batch also carries `orig_seq_lens`, which nothing reads and which only ever grows: it stays the logical length. In
prefill the host knows how many tokens each request has evicted. Graph replay copies `positions` into its static buffer
after this point, so captured graphs need no change.

With deterministic inference, a token is sampled by its request's seed and a position: SGLang takes `positions` in
decode, and the row's length after a prefill.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from sglang_triattn.patches.hooks import Hook
from sglang_triattn.patches.scheduler.chunked_prefill import evicted_in

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

PARAMETERS = (
    "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
    "spec_mrope_positions kv_loc_plan write_cols"
)

# Attribute of a prefill's ForwardBatch: its `evicted_in`.
_EVICTED = "triattention_evicted"


def hooks() -> list[Hook]:
    target = "sglang.srt.model_executor"
    return [
        Hook(f"{target}.forward_batch_info.ForwardBatch.init_new", "after", _use_logical_positions, PARAMETERS),
        Hook(f"{target}.model_runner.ModelRunner.sample", "around", _draw, "self logits_output forward_batch"),
    ]


def _use_logical_positions(forward: ForwardBatch, cls: type, batch: ScheduleBatch, *_: object, **__: object) -> None:
    """Moves each token from its physical position to its logical one; a no-op for requests without rounds.

    Decode: `positions`, `seq_lens`, `orig_seq_lens` are [batch]. The difference is taken on the stream of the forward
    pass, and for every decode batch, so no host flag has to follow requests through merging and filtering.

    Prefill: `positions` is [tokens], the requests' chunks one after another, of `extend_seq_lens` tokens each.
    """
    if forward.forward_mode.is_decode():
        forward.positions = forward.positions + (batch.orig_seq_lens - batch.seq_lens)
    elif forward.forward_mode.is_extend():
        evicted = evicted_in(batch)
        if evicted is not None:
            setattr(forward, _EVICTED, evicted)
            forward.positions = forward.positions + torch.repeat_interleave(
                evicted, cast(torch.Tensor, forward.extend_seq_lens).long(), output_size=len(forward.positions)
            )


def _draw(
    original: Callable, runner: ModelRunner, logits_output: LogitsProcessorOutput, forward_batch: ForwardBatch
) -> torch.Tensor:
    """Samples a request's first token by its seed at the logical position of the prefill's last token.

    Sampling reads `seq_lens`, [batch], for nothing else.
    """
    evicted = getattr(forward_batch, _EVICTED, None)
    if evicted is not None and forward_batch.sampling_info.sampling_seed is not None:
        forward_batch = copy.copy(forward_batch)
        forward_batch.seq_lens = forward_batch.seq_lens + evicted
    return original(runner, logits_output, forward_batch)
