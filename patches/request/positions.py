"""Logical positions of computed and sampled tokens.

SGLang parts: `ForwardBatch.init_new` (sglang/srt/model_executor/forward_batch_info.py), `ModelRunner.sample`
(sglang/srt/model_executor/model_runner.py).

SGLang takes a token's RoPE position from its place in the request's row, which a compaction round shortens. In decode
the batch also carries `orig_seq_lens`, which nothing reads and which only ever grows: it stays the logical length. In
prefill the host knows how many tokens each request has evicted. Graph replay copies `positions` into its static buffer
after this point, so captured graphs need no change.

A model with several position axes (M-RoPE) gets `mrope_positions`, [3, tokens], which SGLang computes from
the same lengths, plus an offset of the request after a prompt with images. Here they follow from logical lengths; those
of drafted tokens (`ForwardBatch.compute_spec_mrope_positions`) are moved with `positions`.

A draft model that reads the served model's KV (`FROZEN_KV_MTP`, sglang/srt/speculative/frozen_kv_mtp_utils.py) stands
at the row's newest token in all steps of a draft, in graphs, too.

With deterministic inference, a token is sampled by its request's seed and a position: SGLang takes `positions` in
decode, and the row's length after a prefill.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.chunked_prefill import evicted_in, evicted_on_host
from sglang_triattn.patches.request.compressed import evicted_of

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
        Hook(
            f"{target}.forward_batch_info.ForwardBatch.init_new",
            "after",
            _use_logical_positions,
            PARAMETERS,
            why="gives tokens their logical positions",
        ),
        Hook(
            f"{target}.forward_batch_info.ForwardBatch._compute_mrope_positions",
            "around",
            _use_logical_lengths,
            "self model_runner batch",
            why="gives tokens their logical positions on several axes (M-RoPE)",
        ),
        Hook(
            "sglang.srt.speculative.frozen_kv_mtp_utils.set_frozen_kv_positions",
            "around",
            _keep_positions,
            "forward_batch topk",
            why="leaves drafts that read the served model's KV at their logical position",
        ),
        Hook(
            f"{target}.model_runner.ModelRunner.sample",
            "around",
            _draw,
            "self logits_output forward_batch",
            why="draws a seeded first token at its logical position",
        ),
    ]


def _use_logical_positions(forward: ForwardBatch, cls: type, batch: ScheduleBatch, *_: object, **__: object) -> None:
    """Moves each token from its physical position to its logical one; a no-op for requests without rounds.

    Decode: `positions`, `seq_lens`, `orig_seq_lens` are [batch]. The difference is taken on the stream of the forward
    pass, and for every decode batch, so no host flag has to follow requests through merging and filtering.

    Drafted tokens are computed one by one by a draft model, verified by the target, and read by the draft model once
    accepted. In these steps `positions` is [batch * n]: n tokens after the row of each request. SGLang does not update
    `orig_seq_lens` for them, so the host's count of evicted tokens is sent along.

    Prefill: `positions` is [tokens], the requests' chunks one after another, of `extend_seq_lens` tokens each.
    """
    mode = forward.forward_mode
    drafts = mode.is_decode() and batch.spec_info is not None
    if mode.is_decode() and not drafts:
        forward.positions = forward.positions + (batch.orig_seq_lens - batch.seq_lens)
    elif drafts or mode.is_target_verify() or mode.is_draft_extend_v2():
        from sglang.srt.speculative.dflash_info import DFlashVerifyInput

        # Blocks have logical positions from `block_drafts` on.
        evicted = None if isinstance(batch.spec_info, DFlashVerifyInput) else evicted_in(batch)
        if evicted is not None:
            drafted = len(forward.positions) // len(evicted)
            shift = torch.repeat_interleave(evicted, drafted, output_size=len(forward.positions))
            forward.positions = forward.positions + shift
            if forward.mrope_positions is not None:
                # SGLang takes these from the former, plus an offset after a prompt with images.
                forward.mrope_positions = forward.mrope_positions + shift
    elif mode.is_extend():
        evicted = evicted_in(batch)
        if evicted is not None:
            setattr(forward, _EVICTED, evicted)
            _leave_out_computed_images(forward, batch)
            forward.positions = forward.positions + torch.repeat_interleave(
                evicted, cast(torch.Tensor, forward.extend_seq_lens).long(), output_size=len(forward.positions)
            )


def _use_logical_lengths(
    original: Callable, forward: ForwardBatch, model_runner: ModelRunner, batch: ScheduleBatch
) -> None:
    """Computes `mrope_positions` as if no row had been shortened.

    A difference added afterwards would not do: SGLang also looks up columns of a table of the request's positions,
    which reaches past its prompt once it has been retracted.
    """
    evicted = evicted_on_host(batch)
    if evicted is None:
        original(forward, model_runner, batch)
        return
    lengths = cast(torch.Tensor, forward.seq_lens_cpu)
    shift = torch.zeros_like(lengths)
    shift[: len(evicted)] = torch.tensor(evicted)
    logical, places = copy.copy(forward), copy.copy(batch)
    logical.seq_lens, logical.seq_lens_cpu = batch.orig_seq_lens, lengths + shift
    if forward.forward_mode.is_extend():
        places.prefix_lens = [place + lost for place, lost in zip(batch.prefix_lens, evicted, strict=True)]
    original(logical, model_runner, places)
    forward.mrope_positions = logical.mrope_positions


def _leave_out_computed_images(forward: ForwardBatch, batch: ScheduleBatch) -> None:
    """Removes images from the prefill of shortened rows, where SGLang would look for them by place.

    They lie in the frozen prompt, which was complete before the first round.
    """
    if forward.mm_inputs is not None:
        left = [
            None if evicted_of(request) else media for request, media in zip(batch.reqs, forward.mm_inputs, strict=True)
        ]
        # SGLang declares no None in the list, and puts it there for requests without images.
        forward.mm_inputs = cast(list, left)


def _keep_positions(_: Callable, forward: ForwardBatch, topk: int) -> None:
    """Leaves `positions`, [batch], what `_use_logical_positions` has made them, where SGLang takes them from the row's
    length once more before each step of a draft."""
    assert topk == 1, "branches have positions of their own, which are refused at launch"


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
