"""Fields of SGLang's `Req` and `ScheduleBatch` (sglang/srt/managers/schedule_batch.py), as this package reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import MultimodalDataItem, Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import BeamGroup


def beams_of(request: Req) -> BeamGroup | None:
    """The beam search of a request; SGLang declares the attribute as always None."""
    return cast("BeamGroup | None", request.beam_group)


def rows_of(request: Req) -> int:
    """Rows that a request takes: one per beam."""
    beams = beams_of(request)
    return 1 if beams is None else beams.beam_width


def end_of_chunk(request: Req) -> int:
    """End of the chunk that a request is prefilling, or prefilled last."""
    return cast(int, request.extend_end)


def decoded_in(batch: ScheduleBatch) -> list[Req]:
    """The requests of a batch that decode a token in it; in a mixed batch, they follow those in prefill."""
    if batch.forward_mode.is_decode():
        return batch.reqs
    return list(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else []


def media_of(request: Req) -> set[str]:
    """Kinds of non-text input in a request's prompt, as `sglang_triattn.request.options.with_media` names them."""
    media = request.multimodal_inputs
    return set() if media is None else kinds_of(media.mm_items)


def kinds_of(items: Sequence[MultimodalDataItem]) -> set[str]:
    """Kinds of `items`."""
    return {item.modality.name.lower() for item in items}


def rotary_shift_of(request: Req) -> int:
    """How much the rotary position of a generated token exceeds the number of tokens before it.

    With several position axes, an image takes fewer positions than tokens, so the shift is negative. SGLang keeps it on
    the host, where each of its decode steps reads it too.
    """
    media = request.multimodal_inputs
    return 0 if media is None or media.mrope_position_delta is None else int(media.mrope_position_delta.item())


def wants_prompt_logprobs(request: Req) -> bool:
    """Whether log-probabilities of prompt tokens were requested, which are looked up by the tokens' places."""
    return request.return_logprob and 0 <= request.logprob_start_len < len(request.origin_input_ids)


def was_aborted(request: Req) -> bool:
    """Whether a request has ended without a whole answer."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return isinstance(request.finished_reason, FINISH_ABORT)
