"""A compressed request and its SGLang `Req` (sglang/srt/managers/schedule_batch.py).

`owner_of` returns a request's `CompressedRequest`, which knows its state and what may follow. Only this module writes
the consequences to `Req`: lengths, token ids, its row, and whether the tree may take it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, cast

from sglang_triattn.config import Config
from sglang_triattn.request.lifecycle import CompressedRequest, Stage
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.plan import ceil_align, frozen_length

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, MultimodalDataItem, Req, ReqKvInfo, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId

    from sglang_triattn.patches.sglang_types import BeamGroup, Scheduler

_OWNER = "triattention"
_SHORTENED = "triattention_shortened_ids"
_NOT_COMPRESSED = CompressionOptions(None)


# Reading a request


def attach_options(request: Req, options: CompressionOptions, reserve: int = 0) -> CompressedRequest:
    """Attaches `options` to an arriving request; one with beam search is not compressed.

    Args:
        reserve: see `CompressedRequest`.
    """
    options = options if request.beam_group is None else _NOT_COMPRESSED
    owner = CompressedRequest(options, withheld=request.skip_radix_cache_insert, reserve=reserve)
    setattr(request, _OWNER, owner)
    if owner.settings is not None:
        write_tree_rule(request)
    return owner


def owner_of(request: Req) -> CompressedRequest:
    """The request's CompressedRequest; one without compression if it did not arrive by SGLang's usual way."""
    owner = getattr(request, _OWNER, None)
    return attach_options(request, _NOT_COMPRESSED) if owner is None else owner


def settings_of(request: Req) -> Config | None:
    """Settings of a request that may be compressed; None for any other (beam search, compression declined)."""
    return owner_of(request).settings


def settings_in_use(request: Req) -> Config:
    """Settings of a request that is compressed."""
    return cast(Config, owner_of(request).settings)


def beams_of(request: Req) -> BeamGroup | None:
    """The beam search of a request; SGLang declares the attribute as always None."""
    return cast("BeamGroup | None", request.beam_group)


def end_of_chunk(request: Req) -> int:
    """End of the chunk that a request is prefilling, or prefilled last."""
    return cast(int, request.extend_end)


def evicted_of(request: Req) -> int:
    """Tokens evicted from the request's current row."""
    return owner_of(request).evicted_tokens


def decoded_in(batch: ScheduleBatch) -> list[Req]:
    """The requests of a batch that decode a token in it; behind the others, if it prefills as well (mixed chunks)."""
    if batch.forward_mode.is_decode():
        return batch.reqs
    return list(batch.decoding_reqs or ()) if batch.forward_mode.is_mixed() else []


def media_of(request: Req) -> set[str]:
    """Kinds of what a request's prompt has besides text, as `sglang_triattn.request.options.with_media` names them."""
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


def tokens_tell_all(request: Req) -> bool:
    """Whether token ids alone determine a request's K/V, so that another request with the same ids may reuse it."""
    return not owner_of(request).withheld and request.input_embeds is None


def frozen_of(request: Req, settings: Config, page_size: int) -> int:
    """First position of the request's row that a round may touch."""
    record = owner_of(request).record
    prompt_len = len(request.origin_input_ids) if record is None else record.prompt_len
    return frozen_length(settings, request.kv.cache_protected_len, prompt_len, page_size)


def long_enough(requests: Sequence[Req]) -> list[int]:
    """Indices of the requests that may have outgrown their budget, as far as two integer comparisons can tell.

    Called for every request in every step, though only a few have a round: a method call for each doubles the cost.
    """
    found = []
    for index, request in enumerate(requests):
        kv, owner = request.kv, getattr(request, _OWNER, None) or owner_of(request)
        may_be_due = kv.kv_committed_len >= owner.due_len or kv.cache_protected_len != owner.due_protected
        if may_be_due and owner.settings is not None:
            found.append(index)
    return found


def wait_until_due(request: Req, page_size: int) -> None:
    """Makes `long_enough` skip a request that has settings but no due round, until its row has grown enough."""
    settings = settings_in_use(request)
    frozen = frozen_of(request, settings, page_size)
    owner_of(request).wait_until(frozen + settings.trigger(frozen), request.kv.cache_protected_len)


def lengths_of(request: Req, page_size: int) -> dict[str, int]:
    """Arguments of `sglang_triattn.rounds.plan.plan_round`, for a request that has settings and holds a row."""
    return {
        "frozen": frozen_of(request, settings_in_use(request), page_size),
        "length": request.kv.kv_committed_len,
        "evicted_before": evicted_of(request),
        "page_size": page_size,
    }


def rows_of(request: Req) -> int:
    """Rows that a request takes: one per beam."""
    beams = beams_of(request)
    return 1 if beams is None else beams.beam_width


def recent_of(request: Req) -> int:
    """Recency window of the next round: `recent`, or fewer if too few tokens came since a round permuted the row.

    That happens only at page sizes above 1, in early rounds, and in turns with other settings.
    """
    appended = request.kv.kv_committed_len - owner_of(request).held_record.unordered_len
    return min(settings_in_use(request).recent, appended)


def wants_prompt_logprobs(request: Req) -> bool:
    """Whether log-probabilities of prompt tokens were requested, which are looked up by the tokens' places."""
    return request.return_logprob and 0 <= request.logprob_start_len < len(request.origin_input_ids)


def can_compact(request: Req) -> bool:
    """Whether a request may be compressed, continues, and holds its row alone."""
    return (
        settings_of(request) is not None
        and request.kv.holds_kv
        and not request.finished()
        and request.to_finish is None
        and not request.is_retracted
        and (request.kv.kv_committed_len == request.kv.kv_allocated_len or owner_of(request).reserve > 0)
    )


# Writing to a request


def give_up_waiting(scheduler: Scheduler) -> None:
    """Has requests that wait for the first time scheduled as by plain SGLang, because compression has stopped.

    Not those whose prompts only rounds would fit into the memory.
    """
    for request in scheduler.waiting_queue:
        owner = owner_of(request)
        fresh = owner.stage is Stage.ARRIVED and not request.retraction_count and request.to_finish is None
        if fresh and owner.settings is not None and len(request.origin_input_ids) < scheduler.max_req_input_len:
            request.skip_radix_cache_insert = owner.withheld
            # Reads its options again, and limits its answer as for every request.
            scheduler.init_req_max_new_tokens(request)


def write_tree_rule(request: Req) -> None:
    """Allows SGLang to give the whole row to the tree, or forbids it; called after every transition."""
    request.skip_radix_cache_insert = not owner_of(request).tree_may_take_all


def write_row_length(request: Req, length: int, allocated: int | None = None) -> None:
    """Sets the row's length to `length` computed entries; with a reserve, `allocated` counts that too."""
    request.kv.kv_committed_len = length
    request.kv.kv_allocated_len = length if allocated is None else allocated


def resume_behind(request: Req, length: int) -> None:
    """Makes the next chunk of a request start right after its row, which a round has shortened to `length` entries."""
    request.prefix_len = request.extend_end = length
    # SGLang counts tokens before a chunk as cached if the request did not compute them.
    request.already_computed = length


def keep_private(request: Req) -> None:
    """Counts the chunk just prefilled as done, without giving it to the tree."""
    request.prefix_len = end_of_chunk(request)


def take_row(request: Req, kv: ReqKvInfo, last_node: NodeId) -> None:
    """Makes a waiting request continue a row that rounds have compacted; its prompt is not looked up anywhere else.

    Args:
        kv: SGLang's record of the row.
        last_node: node of the tree where its frozen part ends.
    """
    request.kv = kv
    show_ids_behind(request)
    request.prefix_len = kv.kv_allocated_len
    request.last_node = request.best_match_node = request.last_host_node = last_node
    request.host_hit_length = request.swa_host_hit_length = request.mamba_host_hit_length = 0
    request.mamba_branching_seqlen = None


def leave_row(request: Req) -> None:
    """Undoes `take_row`: the waiting request has no row again."""
    request.detach_kv()
    request.prefix_len, request.last_node = 0, None


def count_as_cached(request: Req, tokens: int) -> None:
    """Counts evicted tokens of a resumed row as cached: they were not computed again either."""
    request.cached_tokens += tokens


def show_ids_behind(request: Req) -> None:
    """Hides from SGLang as many of a request's first ids as its row has evicted."""
    evicted = evicted_of(request)
    if evicted:
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids[evicted:]
        setattr(request, _SHORTENED, True)


def show_all_ids(request: Req) -> None:
    """Shows SGLang all ids of a request again."""
    if getattr(request, _SHORTENED, False):
        # SGLang completes the array by its length, which is wrong now; given an empty one it starts over.
        request.full_untruncated_fill_ids = array("q")
        setattr(request, _SHORTENED, False)


def end_with_error(request: Req, message: str, evicted: int = 0) -> None:
    """Has SGLang end a running request with status 500, and keeps what it holds out of the tree.

    SGLang computes one more step for it, whose token it does not send.

    Args:
        message: one sentence for the client.
        evicted: tokens evicted from its row by a round that was not recorded.
    """
    owner_of(request).fail(evicted)
    write_tree_rule(request)
    request.to_finish = _server_error(message)
    request.finished_len = len(request.output_ids)


def end_prefill_with_error(scheduler: Scheduler, request: Req, message: str) -> None:
    """The same for a request between two chunks of its prefill; SGLang ends it before the next step."""
    owner_of(request).fail(0)
    write_tree_rule(request)
    request.discard_output_reason = _server_error(message)
    scheduler._pending_chunked_abort_req = request


def _server_error(message: str) -> FINISH_ABORT:
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    return FINISH_ABORT(message, HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError")


def free_tail(kv: ReqKvInfo, length: int, tree_cache: BasePrefixCache) -> None:
    """Frees the pages of a row that lie entirely after its first `length` entries."""
    first_empty = ceil_align(length, tree_cache.page_size)
    if first_empty < kv.kv_allocated_len:
        tree_cache.free_kv_row(kv, [(first_empty, kv.kv_allocated_len)])
