"""Positions of decoded tokens. SGLang part: `ForwardBatch.init_new` (sglang/srt/model_executor/forward_batch_info.py).

SGLang takes a decoded token's RoPE position from the length of the request's row, which a round shortens. The batch
also carries `orig_seq_lens`, which nothing reads in decode and which only ever grows: it stays the logical length.
Graph replay copies `positions` into its static buffer after this point, so captured graphs need no change.
"""

from __future__ import annotations

from typing import Any

from sglang_triattn.patches.hooks import Hook

PARAMETERS = (
    "cls batch model_runner capture_hidden_mode return_hidden_states_before_norm extend_position_info "
    "spec_mrope_positions kv_loc_plan write_cols"
)


def hooks() -> list[Hook]:
    target = "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new"
    return [Hook(target, "after", _use_logical_positions, PARAMETERS)]


def _use_logical_positions(forward: Any, cls: type, batch: Any, *_: Any, **__: Any) -> None:
    """Moves each decoded token from its physical position to its logical one; a no-op for requests without rounds.

    `positions`, `seq_lens`, `orig_seq_lens`: [batch]. The difference is taken on the stream of the forward pass, and
    on every decode batch, so that no host flag has to follow requests through merging and filtering.
    """
    if forward.forward_mode.is_decode():
        forward.positions = forward.positions + (batch.orig_seq_lens - batch.seq_lens)
