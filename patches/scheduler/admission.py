"""Admission by the upper bound of each compressed request.

SGLang parts: `PrefillAdder` (sglang/srt/managers/schedule_policy.py), `Scheduler.init_req_max_new_tokens` and
`validate_input_length` (sglang/srt/managers/{scheduler,utils}.py).

For each request SGLang reserves the tokens that it may still generate, or a share of them that has been enough so far,
and retracts requests when that share falls short. A compressed request never holds more than its bound (`bounds.py`),
so exactly what is left to reach it is reserved, for all of them and in full: the pool is never over-committed.

A prefill that exceeds the bound, of a retracted request or of a prompt that is compacted, gets chunks that fit its
reservation, with compaction rounds between them (`chunked_prefill`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks import Hook, replaced
from sglang_triattn.patches.scheduler.bounds import can_prefill_in_rounds, growth_of, longest_answer, max_kv_tokens_of
from sglang_triattn.patches.scheduler.breaker import Breaker
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.pipeline import requests_beside
from sglang_triattn.patches.scheduler.request import (
    attach_options,
    frozen_of,
    media_of,
    settings_in_use,
    settings_of,
    write_tree_rule,
)
from sglang_triattn.patches.scheduler.reserve import reserve_per_row
from sglang_triattn.patches.scheduler.separation import decodes_alone
from sglang_triattn.request.options import CompressionOptions, read_request, with_media
from sglang_triattn.rounds.plan import ceil_align

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.schedule_policy import PrefillAdder

    from sglang_triattn.patches.sglang_parts import Scheduler


class Admission:
    """Decides which requests are compressed, how long they may get, and what is reserved for them.

    Args:
        config: the server's settings.
        conversations: idle rows that new requests may resume.
        breaker: says when compression has stopped: new requests are then scheduled as by plain SGLang.
    """

    def __init__(self, config: Config, conversations: Conversations, breaker: Breaker) -> None:
        self._config = config
        self._conversations = conversations
        self._breaker = breaker
        self._scheduler: Scheduler = cast("Scheduler", None)  # until it is built
        self._reserve = 0

    def hooks(self) -> list[Hook]:
        scheduler = "sglang.srt.managers.scheduler.Scheduler"
        return [
            Hook(f"{scheduler}.init_req_max_new_tokens", "around", self._attach_and_limit, "self req"),
            Hook(f"{scheduler}.get_prefill_adder_class", "after", self._bound_adder, "self"),
            Hook(
                "sglang.srt.managers.utils.validate_input_length",
                "around",
                self._validate_length,
                "req max_req_input_len allow_auto_truncate",
            ),
            Hook(f"{scheduler}._add_request_to_queue", "before", self._check_prompt, "self req is_retracted"),
            Hook(
                "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len",
                "after",
                self._limit_prefix,
                "self input_len",
            ),
        ]

    def attach(self, scheduler: Scheduler) -> None:
        """Called once the scheduler is built, before any request arrives."""
        self._scheduler, self._reserve = scheduler, reserve_per_row(scheduler)

    def _bound_adder(self, adder: type[PrefillAdder], _: object) -> type[PrefillAdder]:
        return bounded_adder(adder, self._conversations, lambda: requests_beside(self._scheduler))

    def _attach_and_limit(self, original: Callable, scheduler: Scheduler, req: Req) -> None:
        """Reads a new request's settings, and lifts the cap that the size of the pool puts on its answer."""
        try:
            options = with_media(read_request(self._config, req.sampling_params.custom_params), media_of(req))
        except TriAttentionError as error:
            req.set_finish_with_abort(str(error))
            options = CompressionOptions(None)
        if self._breaker.reason is not None:
            options = replace(options, settings=None)
        owner = attach_options(req, options, self._reserve)
        if owner.conversation is not None and owner.settings is not None:
            self._conversations.on_arrival(req)
            if not self._fits(req):
                # If the conversation's row is gone by then, the history cannot be prefilled as a whole.
                owner.compact_prompt()
                write_tree_rule(req)
        params = req.sampling_params
        most, least = params.max_new_tokens, params.min_new_tokens
        original(scheduler, req)
        if settings_of(req) is None or req.to_finish is not None or not self._fits(req):
            return
        limit = scheduler.model_config.context_len - 2 - len(req.origin_input_ids)
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
        if error and len(req.origin_input_ids) < longest and settings_in_use(req).prompt == "frozen":
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

    def _fits(self, req: Req) -> bool:
        """Whether the empty pool holds the request at its bound, prefilled in rounds if need be."""
        settings = settings_in_use(req)
        if self._scheduler.chunked_prefill_size is None:
            return False
        page_size = self._page_size()
        if decodes_alone(self._scheduler) and ceil_align(len(req.origin_input_ids), page_size) > self._capacity():
            return False  # another server sends the prompt's K/V as a whole
        frozen = frozen_of(req, settings, page_size)
        return ceil_align(frozen + settings.trigger(frozen), page_size) + page_size <= self._capacity()

    def _capacity(self) -> int:
        return self._scheduler.max_total_num_tokens - self._reserve  # what may hold computed entries

    def _page_size(self) -> int:
        return self._scheduler.token_to_kv_pool_allocator.page_size


def bounded_adder(
    adder: type[PrefillAdder], conversations: Conversations, beside: Callable[[], Iterable[Req]] = tuple
) -> type[PrefillAdder]:
    """A subclass of SGLang's PrefillAdder that reserves for compressed requests up to their bound.

    Rows of idle conversations make way for requests that are admitted; `beside` returns those of other microbatches.
    """

    class BoundedPrefillAdder(adder):
        _chunk_in_progress = False
        _preempting: set[Req] | None = None

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            # SGLang reserves nothing for what runs in other microbatches.
            others = [req for req in beside() if settings_of(req) is not None]
            self.memory_budget.total_offset += sum(map(self._get_running_request_total_token_offset, others))
            windows = conversations.windows
            if windows is not None and self.running_batch is not None:
                # SGLang reserves nothing there for what runs.
                self.memory_budget.swa_offset += sum(map(windows.growth_of, self.running_batch.reqs))

        def add_one_req(self, req, has_chunked_req, truncation_align_size):
            if settings_of(req) is None:
                return super().add_one_req(req, has_chunked_req, truncation_align_size)
            self._chunk_in_progress = has_chunked_req or self.new_chunked_req is not None
            acquired = conversations.acquire(req)
            # SGLang's other way to admit, for requests without stop conditions while the tree is off, knows no bound.
            with replaced(req.sampling_params, "ignore_eos", False):
                result = super().add_one_req(req, has_chunked_req, truncation_align_size)
            if self.can_run_list and self.can_run_list[-1] is req:
                conversations.commit(req)
            elif acquired:
                conversations.rollback(req)
            if self.new_chunked_req is req:
                # A chunk cut short by memory leaves tokens in this pass, but SGLang tracks only one unfinished prefill.
                self.rem_chunk_tokens = 0
            return result

        def add_chunked_req(self, req):
            left = min(self.rem_chunk_tokens, len(req.full_untruncated_fill_ids) - req.prefix_len)
            self._make_window_room(left)
            if settings_of(req) is None or not can_prefill_in_rounds(req):
                self._make_room(left)
                return super().add_chunked_req(req)
            bound = ceil_align(max_kv_tokens_of(req, self.page_size), self.page_size)
            reserved = max(bound - req.prefix_len, 1)
            self._make_room(min(left, reserved))
            # What is left after the running requests' growth, but never less than was reserved for this one.
            room = max(self._room() - self.page_size, reserved)
            self.chunked_req_limit = min(room, self.chunked_req_limit or room)
            unfinished = super().add_chunked_req(req)
            if unfinished is not None:
                self.rem_chunk_tokens = 0
            return unfinished

        def preempt_to_schedule(self, req):
            self._preempting = set()
            try:
                if settings_of(req) is None:
                    return super().preempt_to_schedule(req)
                held = len(req.full_untruncated_fill_ids)
                growth = growth_of(req, self.page_size, held=held)
                with replaced(req.sampling_params, "max_new_tokens", growth):
                    return super().preempt_to_schedule(req)
            finally:
                self._preempting = None

        def _get_running_request_total_token_offset(self, req):
            if settings_of(req) is None:
                return super()._get_running_request_total_token_offset(req)
            growth = growth_of(req, self.page_size, held=req.kv.kv_allocated_len, computed=req.kv.kv_committed_len)
            if self._preempting is not None and req not in self._preempting:
                # The first call asks what preempting the request would gain, which includes its private slots. The
                # second, when it is preempted, asks for the reservation alone, because by then the slots count as free.
                self._preempting.add(req)
                return growth + req.kv.kv_allocated_len - req.kv.cache_protected_len
            return growth

        def _check_prefill_budget(self, req, **demand):
            check = super()._check_prefill_budget if settings_of(req) is None else self._check_bound
            found = check(req, **demand)
            while not found[0] and conversations.drop_one():
                found = check(req, **demand)
            return found

        def _check_bound(self, req, *, chunk_limit, **demand):
            fits, limit = self._check_rows(req, chunk_limit)
            if not fits or conversations.windows is None:
                return fits, limit
            # What the window layers' pool needs does not depend on the bound; of the other pool it was just told.
            fits, capped = super()._check_prefill_budget(req, **{**demand, "total_tokens": 0}, chunk_limit=limit)
            if capped != limit and self._chunk_in_progress:
                return False, None
            return fits, capped

        def _check_rows(self, req, chunk_limit):
            # All in whole pages; the room does not count what is in use or reserved.
            end, room = len(req.full_untruncated_fill_ids), self._room()
            held = ceil_align(req.prefix_len, self.page_size)
            whole = ceil_align(end, self.page_size) + growth_of(req, self.page_size, held=end) - held
            if whole <= room:
                return True, chunk_limit
            if chunk_limit is None or self._chunk_in_progress or not can_prefill_in_rounds(req):
                return False, None
            bound = ceil_align(max_kv_tokens_of(req, self.page_size), self.page_size) - held
            fits = max(bound, 2 * self.page_size) <= room
            return (True, min(chunk_limit, room - self.page_size)) if fits else (False, None)

        def _room(self) -> int:
            return int(self.rem_total_tokens)

        def _make_room(self, wanted) -> None:
            """Idle rows give way to a prefill that would not find `wanted` slots, for which nobody else might."""
            while int(self.cur_rem_tokens) - self.page_size < wanted and conversations.drop_one():
                pass

        def _make_window_room(self, wanted) -> None:
            """The same in the window layers' pool."""
            windows = conversations.windows
            if windows is None:
                return
            wanted = min(wanted, windows.reach)
            while int(self.memory_budget.remaining_swa) - self.page_size < wanted and conversations.drop_one():
                pass

        def _update_prefill_budget(self, prefix_len, extend_input_len, max_new_tokens, *args, **kwargs):
            # Called for the request that was added last; `max_new_tokens` is 0 until its prefill is complete.
            req = self.can_run_list[-1]
            if max_new_tokens and settings_of(req) is not None:
                max_new_tokens = growth_of(req, self.page_size, held=req.extend_end)
            super()._update_prefill_budget(prefix_len, extend_input_len, max_new_tokens, *args, **kwargs)

    return BoundedPrefillAdder
