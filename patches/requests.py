"""A request's compression state, and its way into and out of the tree.

SGLang parts: `Req` (sglang/srt/managers/schedule_batch.py), `checkpoint_kv_cache` and `release_kv_cache`
(sglang/srt/mem_cache/common.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_triattn.config import Config
from sglang_triattn.patches.hooks import Hook
from sglang_triattn.rounds import Report, RequestState, frozen_length

_SETTINGS = "triattention_settings"
_WITHHELD = "triattention_withheld"
_STATE = "triattention_state"
_REPORT = "triattention_report"


def adopt(request: Any, settings: Config | None) -> None:
    """Lets a new request be compressed with `settings`; None leaves it to SGLang alone.

    A prompt to be compacted is kept out of the tree, which would freeze it.
    """
    setattr(request, _SETTINGS, settings)
    setattr(request, _WITHHELD, request.skip_radix_cache_insert)
    if settings is not None and settings.prompt == "compact":
        request.skip_radix_cache_insert = True


def settings_of(request: Any) -> Config | None:
    """Settings of a request that may be compressed, None of any other (beam search, compression declined)."""
    return getattr(request, _SETTINGS, None) if request.beam_group is None else None


def state_of(request: Any) -> RequestState:
    """The state of the request's current row."""
    state = getattr(request, _STATE, None)
    if state is None:
        state = RequestState()
        setattr(request, _STATE, state)
    return state


def evicted_of(request: Any) -> int:
    """Tokens evicted from the request's current row."""
    state = getattr(request, _STATE, None)
    return 0 if state is None else state.evicted_tokens


def report_of(request: Any) -> Report | None:
    """What compression did to a request that has given its row back; None before."""
    return getattr(request, _REPORT, None)


def frozen_of(request: Any, settings: Config, page_size: int) -> int:
    """First position of the request's row that a round may touch."""
    return frozen_length(settings, request.kv.cache_protected_len, len(request.origin_input_ids), page_size)


def lengths_of(request: Any, page_size: int) -> dict[str, int]:
    """What a plan is made of, see `sglang_triattn.rounds.plan_round`; the request has settings and holds a row."""
    return {
        "frozen": frozen_of(request, settings_of(request), page_size),
        "length": request.kv.kv_allocated_len,
        "evicted_before": evicted_of(request),
        "page_size": page_size,
    }


def can_compact(request: Any) -> bool:
    """Whether a request may be compressed, goes on, and holds its row alone."""
    return (
        settings_of(request) is not None
        and request.kv.holds_kv
        and not request.finished()
        and request.to_finish is None
        and not request.is_retracted
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
    settings = settings_of(req)
    if settings is None:
        setattr(req, _REPORT, _report(req, state, req.kv.cache_protected_len))
        original(req, tree_cache, checkpoint=checkpoint)
        return
    setattr(req, _REPORT, _report(req, state, frozen_of(req, settings, tree_cache.page_size)))
    if not state.rounds:
        # The whole row is exact, and nobody needs to compact it any more: the tree may have it.
        req.skip_radix_cache_insert = getattr(req, _WITHHELD)
    original(req, tree_cache, checkpoint=checkpoint)
    delattr(req, _STATE)
    if not req.finished():
        # Retracted: its next row starts exact, and a frozen prompt may enter the tree again.
        req.skip_radix_cache_insert = getattr(req, _WITHHELD) or settings.prompt == "compact"


def _report(req: Any, state: RequestState, frozen: int) -> Report:
    # With overlap a step may have run past the end; those tokens are nobody's.
    computed = len(req.origin_input_ids) + max(len(req.output_ids_through_stop) - 1, 0)
    logical = min(req.kv.kv_committed_len + state.evicted_tokens, computed)
    physical = logical - state.evicted_tokens
    return Report(
        rounds=state.rounds,
        evicted_tokens=state.evicted_tokens,
        freed_slots=state.freed_slots,
        frozen_length=min(frozen, physical),
        physical_length=physical,
        logical_length=logical,
    )
