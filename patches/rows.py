"""A request's way into and out of the tree: what the tree may have of its row, and where the row goes at the end.

SGLang parts: `checkpoint_kv_cache` and `release_kv_cache` (sglang/srt/mem_cache/common.py).

The tree may have K/V that is what its tokens alone determine: all of a row without evictions; of another its start, up
to the first hole, because what was computed after the first eviction lies behind the hole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from sglang_triattn.patches.conversations import Conversations
from sglang_triattn.patches.hooks import Hook
from sglang_triattn.patches.prefill import show_all_ids
from sglang_triattn.patches.requests import (
    asked_of,
    drop_state,
    frozen_of,
    prompt_length_of,
    set_report,
    settings_of,
    state_of,
    tokens_tell_all,
    withhold_as_at_arrival,
)
from sglang_triattn.rounds import Report, RequestState


class Rows:
    """The hooks on both ways; rows of conversations go to `conversations`."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def hooks(self) -> list[Hook]:
        target = "sglang.srt.mem_cache.common"
        return [
            Hook(f"{target}.checkpoint_kv_cache", "around", self.checkpoint, "req tree_cache"),
            Hook(f"{target}.release_kv_cache", "around", self.release, "req tree_cache checkpoint"),
        ]

    def checkpoint(self, original: Callable, req: Any, tree_cache: Any) -> None:
        """Keeps the regenerated output of a retracted request private.

        SGLang prefills prompt and output of such a request again and would give both to the tree, where they are
        frozen: each retraction would raise the request's memory for good.
        """
        prompt_length = len(req.origin_input_ids)
        if not req.retracted_stain or req.skip_radix_cache_insert or req.extend_end <= prompt_length:
            original(req, tree_cache)
            return
        if req.kv.cache_protected_len < prompt_length:
            tree_cache.checkpoint(req, up_to=prompt_length)
        req.prefix_len = req.extend_end

    def release(self, original: Callable, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
        """Writes the request's report, and gives its row to its conversation or back to SGLang."""
        if not req.kv.holds_kv:
            original(req, tree_cache, checkpoint=checkpoint)
            return
        state, settings, asked = state_of(req), settings_of(req), asked_of(req)
        if state.evicted_tokens and not req.skip_radix_cache_insert:
            raise RuntimeError(f"request {req.rid} has evicted tokens, but its row is about to enter the tree")
        if settings is None:
            set_report(req, report_on(req, state, req.kv.cache_protected_len))
            give_back(original, req, tree_cache, checkpoint=checkpoint)
            return
        state.prompt_length = prompt_length_of(req)
        report = report_on(req, state, frozen_of(req, settings, tree_cache.page_size))
        asked.kept = self._conversations.keep(req, report.physical_length)
        if asked.conversation is not None:
            report = replace(report, conversation=asked.start, conversation_kept=asked.kept)
        set_report(req, report)
        if not asked.kept:
            if not state.evicted_tokens:
                withhold_as_at_arrival(req)
            elif checkpoint and tokens_tell_all(req):
                publish_start(req, state, tree_cache)
            give_back(original, req, tree_cache, checkpoint=checkpoint)
        drop_state(req)
        if not req.finished():
            # Retracted: its next row starts exact, and a frozen prompt may enter the tree again.
            withhold_as_at_arrival(req)
            req.skip_radix_cache_insert |= settings.prompt == "compact"


def publish_start(req: Any, state: RequestState, tree_cache: Any) -> None:
    """Gives the tree a finished row's entries before its first hole, if these are more than it has.

    No more than SGLang's release takes for the request's: with --strip-thinking-cache it frees what was generated.
    """
    exact = min(state.exact_length(), req.owned_kv_len())
    exact -= exact % tree_cache.page_size
    if exact > req.kv.cache_protected_len:
        show_all_ids(req)
        req.refresh_fill_ids()
        tree_cache.checkpoint(req, up_to=exact)


def give_back(original: Callable, req: Any, tree_cache: Any, *, checkpoint: bool) -> None:
    """SGLang's release of a row, of which the tree may own more than the prompt.

    With --strip-thinking-cache SGLang frees everything behind the prompt. A retracted request may have found its own
    answer in the tree, as part of another's prompt: it is then released as one that has not reasoned, whose slots begin
    where the tree's end, and the tree gets nothing more.
    """
    if req.owned_kv_len() >= req.kv.cache_protected_len:
        original(req, tree_cache, checkpoint=checkpoint)
        return
    reasoning, req.reasoning_tokens = req.reasoning_tokens, 0
    try:
        original(req, tree_cache, checkpoint=False)
    finally:
        req.reasoning_tokens = reasoning


def report_on(req: Any, state: RequestState, frozen: int) -> Report:
    """The report of a request that gives its row back, of which rounds left `frozen` entries alone."""
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
