"""The attention of a draft model on plain CPUs.

SGLang parts: `DraftBackendFactory` (sglang/srt/speculative/draft_utils.py), which knows none for CPUs of any kind;
`EagleDraftWorker.draft_forward` (sglang/srt/speculative/eagle_worker_v2.py), which asks one backend for each token
that it drafts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_triattn.patches.cpu.attention import Span
from sglang_triattn.patches.cpu.reference_backend import ReferenceBackend

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    from sglang_triattn.patches.sglang_types import ModelRunner


class OneDraft(ReferenceBackend):
    """The backend for the drafted token that follows `drafted` others."""

    def __init__(self, runner: ModelRunner, drafted: int) -> None:
        super().__init__(runner)
        self._drafted = drafted

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        # Lengths are those of the rows before any token was drafted.
        rows, lengths = forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist()
        self._spans = [Span(row, length + self._drafted, 1) for row, length in zip(rows, lengths, strict=True)]


class Drafts:
    """The backends for all tokens of a draft but the last, which no attention follows."""

    def __init__(self, runner: ModelRunner, steps: int) -> None:
        self.attn_backends = [OneDraft(runner, drafted) for drafted in range(steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def for_drafts(self: DraftBackendFactory) -> Drafts:
    """Stands for `DraftBackendFactory.create_decode_backend`."""
    return Drafts(self.draft_model_runner, self.speculative_num_steps)


def for_verified(self: DraftBackendFactory) -> ReferenceBackend:
    """Stands for `DraftBackendFactory.create_draft_extend_backend`: for the tokens that were just verified."""
    return ReferenceBackend(self.draft_model_runner)
