"""Logical positions of a draft model that drafts a block of tokens at once from the served model's hidden states.

SGLang part: `DFlashWorkerV2` (sglang/srt/speculative/dflash_worker_v2.py).

What such a model attends to are K/V that it makes of the served model's hidden states, once the tokens have been
computed: they lie in the slots of the same tokens. The worker counts positions of blocks and of these K/V from the
length of the row, which rounds shorten.

Blocks with a shortened row are laid out by the worker's own torch code in place of its kernel, which takes no offset of
a row: six small launches for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.patches.hooks.hook import Hook, replaced
from sglang_triattn.patches.request.chunked_prefill import evicted_in

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

WORKER = "sglang.srt.speculative.dflash_worker_v2.DFlashWorkerV2"

# Attribute of a worker during a step: tokens evicted from each row, [R] int64; None if no row has lost any.
_EVICTED = "triattention_evicted"


def hooks() -> list[Hook]:
    return [
        Hook(
            f"{WORKER}.forward_batch_generation",
            "around",
            _draft,
            "self batch on_publish grammar_barrier pp_proxy_tensors",
            why="drafts and verifies blocks at their logical positions",
        ),
        Hook(
            f"{WORKER}._append_target_hidden_to_draft_kv_by_loc",
            "around",
            _store,
            "self target_hidden cache_loc positions cache_loc_2d commit_lens extend_lens",
            why="rotates the draft model's keys of a prefill by their logical positions",
        ),
    ]


def _draft(original: Callable, worker: DFlashWorkerV2, batch: ScheduleBatch, *args: Any, **kwargs: Any) -> Any:
    """Runs a step with the offsets of blocks, [block], made those of each row, [R, block]."""
    evicted = evicted_in(batch)
    setattr(worker, _EVICTED, evicted)
    if evicted is None:
        return original(worker, batch, *args, **kwargs)
    offsets = worker._block_pos_offsets + evicted[:, None]
    with replaced(worker, "_block_pos_offsets", offsets), replaced(worker, "_use_triton_prepare_block", False):
        return original(worker, batch, *args, **kwargs)


def _store(
    original: Callable,
    worker: DFlashWorkerV2,
    *,
    positions: torch.Tensor,
    extend_lens: torch.Tensor | None = None,
    **others: Any,
) -> None:
    """Stores K/V of tokens that a prefill has computed, [tokens] of `extend_lens` [R] each, at logical positions; those
    of a verified block have them."""
    evicted = getattr(worker, _EVICTED)
    if evicted is not None and extend_lens is not None:
        positions = positions + torch.repeat_interleave(evicted, extend_lens.long(), output_size=len(positions))
    original(worker, positions=positions, extend_lens=extend_lens, **others)
