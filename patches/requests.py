"""A request's compression state, and its way into and out of the tree.

SGLang parts: `Req` (sglang/srt/managers/schedule_batch.py), `checkpoint_kv_cache` and `release_kv_cache`
(sglang/srt/mem_cache/common.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_triattn.patches.hooks import Hook
from sglang_triattn.rounds import Report, RequestState, frozen_length

_STATE = "triattention_state"
_REPORT = "triattention_report"


def state_of(request: Any) -> RequestState:
    """The state of the request's current row."""
    state = getattr(request, _STATE, None)
    if state is None:
        state = RequestState()
        setattr(request, _STATE, state)
    return state


def report_of(request: Any) -> Report | None:
    """What compression did to a request that has given its row back; None before."""
    return getattr(request, _REPORT, None)


def frozen_of(request: Any, page_size: int) -> int:
    """First position of the request's row that a round may touch."""
    return frozen_length(request.kv.cache_protected_len, len(request.origin_input_ids), page_size)


def can_compact(request: Any) -> bool:
    """Whether a request of the running batch is in plain decode, holding its row alone."""
    return (
        request.kv.holds_kv
        and not request.finished()
        and request.to_finish is None
        and not request.is_retracted
        and request.beam_group is None
        and request.kv.kv_committed_len == request.kv.kv_allocated_len
    )


def hooks() -> list[Hook]:
    target = "sglang.srt.mem_cache.common"
    return [
        Hook(f"{target}.checkpoint_kv_cache", "around", _checkpoint_prompt_only, "req tree_cache"),
        Hook(f"{target}.release_kv_cache", "around", _release_with_state, "req tree_cache checkpoint"),
    ]


def _checkpoint_prompt_only(original: Callable, req: Any, tree_cache: Any) -> None:
    """Keeps the regenerated output of a retracted request private.

    SGLang prefills prompt and output of such a request again and would give both to the tree, where they are frozen:
    each retraction would raise the request's memory for good.
    """
    prompt_length = len(req.origin_input_ids)
    if not req.retracted_stain or req.skip_radix_cache_insert or req.extend_end <= prompt_length:
        original(req, tree_cache)
        return
    if req.kv.cache_protected_len < prompt_length:
        tree_cache.checkpoint(req, up_to=prompt_length)
    req.prefix_len = req.extend_end


def _release_with_state(original: Callable, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """Drops a request's state together with its row, and keeps its report."""
    if not req.kv.holds_kv:
        original(req, tree_cache, checkpoint=checkpoint)
        return
    state = state_of(req)
    if state.evicted_tokens and not req.skip_radix_cache_insert:
        raise RuntimeError(f"request {req.rid} has evicted tokens, but its row is about to enter the tree")
    setattr(req, _REPORT, _report(req, state, tree_cache.page_size))
    original(req, tree_cache, checkpoint=checkpoint)
    delattr(req, _STATE)
    if state.rounds and not req.finished():
        # Retracted: its next row starts exact, and its prompt may enter the tree again.
        req.skip_radix_cache_insert = state.withheld_before


def _report(req: Any, state: RequestState, page_size: int) -> Report:
    # With overlap a step may have run past the end; those tokens are nobody's.
    computed = len(req.origin_input_ids) + max(len(req.output_ids_through_stop) - 1, 0)
    logical = min(req.kv.kv_committed_len + state.evicted_tokens, computed)
    physical = logical - state.evicted_tokens
    return Report(
        rounds=state.rounds,
        evicted_tokens=state.evicted_tokens,
        freed_slots=state.freed_slots,
        frozen_length=min(frozen_of(req, page_size), physical),
        physical_length=physical,
        logical_length=logical,
    )
