"""Positions of computed tokens. SGLang part: `ForwardBatch.init_new` (sglang/srt/model_executor/forward_batch_info.py).

SGLang takes a token's RoPE position from its place in the request's row, which a round shortens. In decode the batch
also carries `orig_seq_lens`, which nothing reads and which only ever grows: it stays the logical length. In prefill
the host knows how many tokens each request has evicted. Graph replay copies `positions` into its static buffer after
this point, so captured graphs need no change.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_triattn.patches.hooks import Hook
from sglang_triattn.patches.prefill import evicted_in

PARAMETERS = (
    "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
    "spec_mrope_positions kv_loc_plan write_cols"
)


def hooks() -> list[Hook]:
    target = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
    return [Hook(target, "after", _use_logical_positions, PARAMETERS)]


def _use_logical_positions(forward: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
    """Moves each token from its physical position to its logical one; a no-op for requests without rounds.

    Decode: `positions`, `seq_lens`, `orig_seq_lens` are [batch]. The difference is taken on the stream of the forward
    pass, and on every decode batch, so that no host flag has to follow requests through merging and filtering.
    Prefill: `positions` is [tokens], the requests' chunks one after another, of `extend_seq_lens` tokens each.
    """
    if forward.forward_mode.is_decode():
        forward.positions = forward.positions + (batch.orig_seq_lens - batch.seq_lens)
    elif forward.forward_mode.is_extend():
        evicted = evicted_in(batch)
        if evicted is not None:
            forward.positions = forward.positions + torch.repeat_interleave(
                evicted, forward.extend_seq_lens.long(), output_size=len(forward.positions)
            )
