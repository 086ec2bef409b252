"""Radix-tree insertion and release: what the tree may take of a request's row, and where the row goes at the end.

SGLang parts: `checkpoint_kv_cache` and `release_kv_cache` (sglang/srt/mem_cache/common.py).

Only exact K/V may enter the tree: the whole row if nothing was evicted, else the entries before the first evicted
position (`sglang_triattn.request.lifecycle`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.request.chunked_prefill import keep_private, show_all_ids
from sglang_triattn.patches.request.compressed import (
    compression_of,
    frozen_of,
    ids_determine_kv,
    protected_of,
    settings_of,
    write_tree_rule,
)
from sglang_triattn.patches.request.fields import end_of_chunk
from sglang_triattn.patches.request.window_pool import slide_window
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.rounds.plan import Report

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache


class Rows:
    """The hooks on insertion and release; rows of conversations go to `conversations`."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations

    def hooks(self) -> list[Hook]:
        target = "sglang.srt.mem_cache.common"
        return [
            Hook(
                f"{target}.checkpoint_kv_cache",
                "around",
                self.checkpoint,
                "req tree_cache",
                why="keeps the answer of a retracted request out of the tree",
            ),
            Hook(
                f"{target}.release_kv_cache",
                "around",
                self.release,
                "req tree_cache checkpoint",
                why="parks, publishes or retracts a row, and writes the report",
            ),
        ]

    def checkpoint(self, original: Callable, req: Req, tree_cache: BasePrefixCache) -> None:
        """Keeps the regenerated output of a retracted request private.

        SGLang prefills the prompt and output of such a request again and would give both to the tree, where they are
        frozen: each retraction would raise the request's memory for good.
        """
        prompt_length = len(req.origin_input_ids)
        if req.skip_radix_cache_insert or not req.retracted_stain or end_of_chunk(req) <= prompt_length:
            original(req, tree_cache)
        else:
            # A state cannot be shortened: that of this request has seen more than the prompt.
            if req.kv.cache_protected_len < prompt_length and not tree_cache.supports_mamba():
                tree_cache.checkpoint(req, up_to=prompt_length)
            keep_private(req)
        if settings_of(req) is not None and (req.skip_radix_cache_insert or end_of_chunk(req) > prompt_length):
            slide_window(req, tree_cache)

    def release(self, original: Callable, req: Req, tree_cache: BasePrefixCache, *, checkpoint: bool) -> None:
        """Writes the request's report, and gives its row to its conversation or back to SGLang."""
        CompressedRequest.releases += 1
        self._conversations.finish_copies()
        if not req.kv.holds_kv:
            original(req, tree_cache, checkpoint=checkpoint)
            return
        compression = compression_of(req)
        if compression.evicted_tokens and not req.skip_radix_cache_insert:
            raise RuntimeError(f"request {req.rid} has evicted tokens, but its row is about to enter the tree")
        report = report_on(req, tree_cache.page_size)
        if compression.settings is None:
            if compression.conversation is not None:
                # It arrived after compression had stopped.
                start = self._conversations.start_without_row(compression.conversation)
                report = replace(report, conversation=start, conversation_kept=False)
            compression.report = report
            give_back(original, req, tree_cache, checkpoint=checkpoint)
            return
        kept = self._conversations.park(req, report)
        if compression.keeps_row:
            waits = kept or self._conversations.keeps(compression)
            report = replace(report, conversation=compression.start, conversation_kept=waits)
        if kept:
            compression.report = report
        elif req.finished():
            exact = compression.publish(report)
            write_tree_rule(req)
            if exact is not None and checkpoint and ids_determine_kv(req):
                publish_start(req, exact, tree_cache)
            give_back(original, req, tree_cache, checkpoint=checkpoint)
        else:
            give_back(original, req, tree_cache, checkpoint=checkpoint)
            if req.kv.retraction_backup is None:
                compression.retract(report)
            else:
                compression.suspend(report)
            write_tree_rule(req)


def publish_start(req: Req, exact: int, tree_cache: BasePrefixCache) -> None:
    """Gives the tree the first `exact` entries of a finished row, if that is more than it has.

    It gets no more than SGLang's release counts as the request's own: with --strip-thinking-cache that frees what was
    generated. Where window layers have a KV pool of their own, it gets nothing: a round has freed their K/V
    (`window_pool`), and SGLang matches no prefix without it. It also gets nothing where layers keep a state: SGLang
    matches no prefix without one, and the request's own state has seen the whole answer.
    """
    if tree_cache.supports_swa() or tree_cache.supports_mamba():
        return
    exact = min(exact, req.owned_kv_len())
    exact -= exact % tree_cache.page_size
    if exact > req.kv.cache_protected_len:
        show_all_ids(req)
        req.refresh_fill_ids()
        tree_cache.checkpoint(req, up_to=exact)


def give_back(original: Callable, req: Req, tree_cache: BasePrefixCache, *, checkpoint: bool) -> None:
    """SGLang's release of a row, even if the tree owns more of it than the prompt.

    With --strip-thinking-cache SGLang frees everything after the prompt. But a retracted request may have found its own
    answer in the tree, as part of another request's prompt. It is then released as one that has not reasoned, whose
    slots begin where the tree's end, and the tree gets nothing more.
    """
    if req.owned_kv_len() >= req.kv.cache_protected_len:
        original(req, tree_cache, checkpoint=checkpoint)
        return
    reasoning, req.reasoning_tokens = req.reasoning_tokens, 0
    try:
        original(req, tree_cache, checkpoint=False)
    finally:
        req.reasoning_tokens = reasoning


def report_on(req: Req, page_size: int) -> Report:
    """The report of a request that gives its row back."""
    compression = compression_of(req)
    protected = req.kv.cache_protected_len
    frozen = protected if compression.settings is None else frozen_of(req, compression.settings, page_size)
    # With overlap, a step may have run past the end; its tokens belong to no request.
    computed = len(req.origin_input_ids) + max(len(req.output_ids_through_stop) - 1, 0)
    logical = min(req.kv.kv_committed_len + compression.evicted_tokens, computed)
    physical = logical - compression.evicted_tokens
    keeps = compression.keeps_row
    return Report(
        rounds=compression.rounds,
        evicted_tokens=compression.own_evicted_tokens,
        freed_slots=compression.freed_slots,
        frozen_length=min(frozen, physical),
        physical_length=physical,
        logical_length=logical,
        conversation_evicted_tokens=compression.evicted_tokens if keeps else None,
        protected_length=protected_of(compression, frozen, physical, page_size) if keeps else None,
    )
