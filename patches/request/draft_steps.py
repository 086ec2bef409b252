"""Lengths of rows where a draft model's attention plans the steps of a draft.

SGLang parts: `common_template` of `FlashInferMultiStepDraftBackend`, `FlashInferMLAMultiStepDraftBackend` and
`TritonMultiStepDraftBackend` (sglang/srt/layers/attention/), which list the KV slots that each step reads.

Their kernel (`generate_draft_decode_kv_indices`) puts a row's slots where the lengths of the rows before it end, but
writes these ends by adding up positions, which equal the lengths of rows that were never shortened. So while they plan,
positions are physical. The model's own stay logical: draft steps rotate by them afterwards.

The multi-step backends of FlashAttention, FlashMLA and TensorRT-LLM plan by lengths alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_triattn.patches.hooks.hook import Hook, replaced

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


def hooks() -> list[Hook]:
    backends = "sglang.srt.layers.attention"
    parameters = "self forward_batch kv_indices_buffer call_fn"
    return [
        Hook(
            f"{backends}.flashinfer_backend.FlashInferMultiStepDraftBackend.common_template",
            "around",
            _plan_by_rows,
            parameters,
            why="lists the KV that each step of a draft reads by physical lengths",
        ),
        Hook(
            f"{backends}.flashinfer_mla_backend.FlashInferMLAMultiStepDraftBackend.common_template",
            "around",
            _plan_by_rows,
            parameters,
            why="lists the latent KV that each step of a draft reads",
        ),
        Hook(
            f"{backends}.triton_backend.TritonMultiStepDraftBackend.common_template",
            "around",
            _plan_by_rows,
            f"{parameters} window_kv_indices_buffer",
            why="lists the KV that each step of a draft reads with Triton's attention",
        ),
    ]


def _plan_by_rows(
    original: Callable, backend: object, forward_batch: ForwardBatch, *args: object, **kwargs: object
) -> None:
    """Plans with physical positions.

    `seq_lens` is [batch], `positions` [batch * branches]: the first token of each of a row's branches stands at the
    row's length. A position is never below that, except in the rows that pad a batch for a graph, where SGLang puts 0:
    they keep it, so that plans without rounds are SGLang's own.
    """
    positions, lengths = forward_batch.positions, forward_batch.seq_lens
    lengths = lengths.repeat_interleave(len(positions) // len(lengths))
    physical = torch.minimum(positions, lengths).to(positions.dtype)
    with replaced(forward_batch, "positions", physical):
        original(backend, forward_batch, *args, **kwargs)
