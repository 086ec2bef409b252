"""The attention of a draft model on plain CPUs.

SGLang parts: `DraftBackendFactory` (sglang/srt/speculative/draft_utils.py), which knows none for CPUs of any kind;
`EagleDraftWorker.draft_forward` (sglang/srt/speculative/eagle_worker_v2.py), which asks one backend for each step.

In a step, each branch of a draft gets one token, whose K/V go to a slot of the branch. SGLang counts for the tokens of
a branch those in its slots, also where a step goes on from another branch: that costs a draft at most.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.speculative.spec_utils import resolve_draft_decode_window

from sglang_triattn.patches.cpu.attention import Span
from sglang_triattn.patches.cpu.reference_backend import ReferenceBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_triattn.patches.sglang_types import ModelRunner


class OneStep(ReferenceBackend):
    """The backend for one token of each branch of a draft.

    Args:
        drafted: tokens of the branch before it.
        branches, steps: tokens that each step drafts, and how many steps there are.
    """

    def __init__(self, runner: ModelRunner, drafted: int, branches: int, steps: int) -> None:
        super().__init__(runner)
        self._drafted, self._branches, self._steps = drafted, branches, steps
        self._newest, self._sinks = resolve_draft_decode_window(runner)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        # Lengths are those of the rows before any token was drafted; the slots are those of the whole draft.
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        slots = forward_batch.out_cache_loc.view(len(rows), self._branches, self._steps)[..., : self._drafted + 1]
        self._spans = [
            self._span(row, length, branch)
            for row, length, branches in zip(rows, lengths, slots, strict=True)
            for branch in branches
        ]

    def _span(self, row: int, length: int, branch: torch.Tensor) -> Span:
        """What the newest token of a branch asks, whose slots are `branch`, [drafted + 1], after a row's tokens. With
        `--speculative-draft-window-size`, it sees of these what `generate_draft_decode_kv_indices` lists
        (sglang/kernels/ops/speculative/cache_locs.py)."""
        if not self._newest or length <= self._newest + self._sinks:
            return Span(row, length + self._drafted, 1, branch=branch)
        slots = self.req_to_token_pool.req_to_token[row, :length].long()
        seen = torch.cat([slots[: self._sinks], slots[-self._newest :], branch])
        return Span(row, len(seen) - 1, 1, branch=seen)


class Drafts:
    """The backends for all steps of a draft but the last, which no attention follows."""

    def __init__(self, runner: ModelRunner, branches: int, steps: int) -> None:
        self.attn_backends = [OneStep(runner, drafted, branches, steps) for drafted in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def for_drafts(self: DraftBackendFactory) -> Drafts:
    """Stands for `DraftBackendFactory.create_decode_backend`."""
    return Drafts(self.draft_model_runner, self.topk, self.speculative_num_steps)


def for_verified(self: DraftBackendFactory) -> ReferenceBackend:
    """Stands for `DraftBackendFactory.create_draft_extend_backend`: for the tokens that were just verified."""
    return ReferenceBackend(self.draft_model_runner)
