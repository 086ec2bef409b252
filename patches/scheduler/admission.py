"""Admission by the upper bound of each compressed request.

SGLang parts: `Scheduler.init_req_max_new_tokens`, `validate_input_length` (sglang/srt/managers/{scheduler,utils}.py).

For each request SGLang reserves the tokens that it may still generate, or a share of them that has been enough so far,
and retracts requests when that share falls short. A compressed request never holds more than its bound (`bounds.py`),
so exactly what is left to reach it is reserved, for all of them and in full: the pool is never over-committed
(`bounded_adder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.ranks.pipeline import requests_of_other_batches
from sglang_triattn.patches.request.bounds import can_prefill_in_rounds, longest_answer
from sglang_triattn.patches.request.compressed import (
    attach_options,
    compression_of,
    frozen_of,
    settings_in_use,
    settings_of,
    write_tree_rule,
)
from sglang_triattn.patches.request.draft_reserve import reserve_per_row
from sglang_triattn.patches.request.fields import media_of
from sglang_triattn.patches.scheduler.bounded_adder import bounded_adder
from sglang_triattn.patches.scheduler.circuit_breaker import Breaker
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.disaggregation import decodes_alone
from sglang_triattn.request.lifecycle import Stage
from sglang_triattn.request.options import CompressionOptions, read_request, with_media
from sglang_triattn.rounds.plan import ceil_align
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from sglang_triattn.patches.sglang_types import Scheduler


class Admission:
    """Decides which requests are compressed, how long they may get, and what is reserved for them.

    Args:
        config: the server's settings.
        conversations: idle rows that new requests may resume.
        breaker: says when compression has stopped: new requests are then scheduled as by plain SGLang.
    """

    def __init__(self, config: RoundRules, conversations: Conversations, breaker: Breaker) -> None:
        self._config = config
        self._conversations = conversations
        self._breaker = breaker
        self._scheduler: Scheduler
        self._reserve = 0

    def hooks(self) -> list[Hook]:
        scheduler = "sglang.srt.managers.scheduler.Scheduler"
        return [
            Hook(
                f"{scheduler}.init_req_max_new_tokens",
                "around",
                self._attach_and_limit,
                "self req",
                why="attaches the request's settings; lets answers be longer than the pool",
            ),
            Hook(
                f"{scheduler}.get_prefill_adder_class",
                "after",
                self._bound_adder,
                "self",
                why="reserves by the bound; resumes conversations",
            ),
            Hook(
                "sglang.srt.managers.utils.validate_input_length",
                "around",
                self._validate_length,
                "req max_req_input_len allow_auto_truncate",
                why="lets a prompt that is compacted be longer than the pool",
            ),
            Hook(
                f"{scheduler}._add_request_to_queue",
                "before",
                self._check_prompt,
                "self req is_retracted",
                why="holds to the pool a prompt that allows no rounds",
            ),
            Hook(
                "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
                "after",
                self._limit_prefix,
                "self input_len",
                why="leaves room next to the frozen prefix of a compacted prompt",
            ),
        ]

    def attach(self, scheduler: Scheduler) -> None:
        """Called once the scheduler is built, before any request arrives."""
        self._scheduler, self._reserve = scheduler, reserve_per_row(scheduler)

    def _bound_adder(self, adder: type[PrefillAdder], _: object) -> type[PrefillAdder]:
        return bounded_adder(adder, self._conversations, lambda: requests_of_other_batches(self._scheduler))

    def _attach_and_limit(self, original: Callable, scheduler: Scheduler, req: Req) -> None:
        """Reads a new request's settings, and lifts the cap that the size of the pool puts on its answer."""
        try:
            options = with_media(read_request(self._config, req.sampling_params.custom_params), media_of(req))
        except TriAttentionError as error:
            req.set_finish_with_abort(str(error))
            options = CompressionOptions(None)
        if self._breaker.reason is not None:
            options = replace(options, settings=None)
        compression = attach_options(req, options, self._reserve)
        if compression.keeps_row and compression.settings is not None:
            self._conversations.on_arrival(req)
            if not self._fits(req) and self._conversations.is_continued(req):
                # If the conversation's row is gone by then, the history cannot be prefilled as a whole.
                compression.compact_prompt()
                write_tree_rule(req)
        params = req.sampling_params
        most, least = params.max_new_tokens, params.min_new_tokens
        original(scheduler, req)
        if settings_of(req) is None or req.to_finish is not None or not self._fits(req):
            return
        limit = scheduler.model_config.context_len - 2 - len(req.origin_input_ids)
        longest = self._longest(req)
        if longest is not None:
            limit = min(limit, longest - len(req.origin_input_ids))
        for other in (most, scheduler.max_new_tokens_limit or None):
            limit = limit if other is None else min(limit, other)
        params.max_new_tokens = max(limit, longest_answer(req))
        params.min_new_tokens = min(least, params.max_new_tokens)

    def _validate_length(self, original: Callable, req: Req, max_req_input_len: int, allow_auto_truncate: bool):
        """Allows prompts that are compacted to be longer than the pool."""
        longest = self._scheduler.model_config.context_len - 6
        if settings_of(req) is None or len(req.origin_input_ids) < max_req_input_len:
            return original(req, max_req_input_len, allow_auto_truncate)
        if self._fits(req):
            return original(req, longest, allow_auto_truncate)
        error = original(req, max_req_input_len, allow_auto_truncate)
        in_rounds = self._scheduler.chunked_prefill_size is not None and settings_in_use(req).prompt == "frozen"
        if error and len(req.origin_input_ids) < longest and in_rounds:
            error += " A prompt that is compacted may be longer: see --triattention-prompt compact."
        return error

    def _check_prompt(self, scheduler: Scheduler, req: Req, *_: object, **__: object) -> None:
        """Limits a prompt to the pool if it was to be compacted, but its prefill allows no rounds."""
        settings = settings_of(req)
        if settings is None or req.to_finish is not None or settings.prompt == "frozen" or can_prefill_in_rounds(req):
            return
        if len(req.origin_input_ids) >= scheduler.max_req_input_len:
            req.set_finish_with_abort(
                f"The prompt ({len(req.origin_input_ids)} tokens) does not fit the KV pool as a whole, and cannot be "
                "compacted while it is prefilled because its log-probabilities or embeddings were asked for: leave "
                "these out, or shorten the prompt."
            )
            return
        # If SGLang retracts the request, prompt and answer must be prefilled again as a whole.
        page_size = self._page_size()
        room = self._capacity() - page_size - ceil_align(len(req.origin_input_ids), page_size)
        params = req.sampling_params
        params.max_new_tokens = max(min(longest_answer(req), room - 1), 0)
        params.min_new_tokens = min(params.min_new_tokens, params.max_new_tokens)

    def _limit_prefix(self, length: int, req: Req, _: int) -> int | None:
        """Matches less of a prompt in the tree if the whole match, which is frozen, would fill the pool."""
        settings = settings_of(req)
        if settings is None or settings.prompt == "frozen":
            return None
        return max(min(length, self._capacity() - settings.trigger(0) - 2 * self._page_size()), 0)

    def give_up_waiting(self) -> None:
        """Has requests that wait for the first time scheduled as by plain SGLang, because compression has stopped.

        Not those whose prompts only rounds would fit into the memory.
        """
        scheduler = self._scheduler
        for request in scheduler.waiting_queue:
            compression = compression_of(request)
            fresh = compression.stage is Stage.ARRIVED and not request.retraction_count and request.to_finish is None
            fitting = len(request.origin_input_ids) < scheduler.max_req_input_len
            if fresh and compression.settings is not None and fitting:
                request.skip_radix_cache_insert = compression.withheld
                # Reads its options again, and limits its answer as for every request.
                scheduler.init_req_max_new_tokens(request)

    def _fits(self, req: Req) -> bool:
        """Whether the empty pool holds the request at its bound, prefilled in rounds if need be."""
        settings = settings_in_use(req)
        if self._scheduler.chunked_prefill_size is None:
            return False
        page_size = self._page_size()
        if decodes_alone(self._scheduler) and ceil_align(len(req.origin_input_ids), page_size) > self._capacity():
            return False  # another server sends the prompt's K/V as a whole
        longest = self._longest(req)
        return longest is None or longest > max(len(req.origin_input_ids), frozen_of(req, settings, page_size))

    def _longest(self, req: Req) -> int | None:
        """Most tokens, prompt included, of a request that the empty pool holds at its bound; None if any number."""
        settings, page_size = settings_in_use(req), self._page_size()
        frozen = frozen_of(req, settings, page_size)
        private = settings.longest_private(frozen, (self._capacity() // page_size - 1) * page_size - frozen)
        return None if private is None else frozen + private

    def _capacity(self) -> int:
        return self._scheduler.max_total_num_tokens - self._reserve  # what may hold computed entries

    def _page_size(self) -> int:
        return self._scheduler.token_to_kv_pool_allocator.page_size
