"""Reservation by the upper bound of each compressed request.

SGLang part: `PrefillAdder` (sglang/srt/managers/schedule_policy.py), which admits requests to a prefill and cuts
prompts into chunks.

A prefill that exceeds the bound, of a retracted request or of a prompt that is compacted, gets chunks that fit its
reservation, with compaction rounds between them (`chunked_prefill.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING

from sglang_triattn.patches.hooks.hook import replaced
from sglang_triattn.patches.request.bounds import can_prefill_in_rounds, growth_in, growth_of, max_kv_tokens_of
from sglang_triattn.patches.request.compressed import settings_of
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.rounds.plan import ceil_align

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.managers.schedule_policy import PrefillAdder


def bounded_adder(
    adder: type[PrefillAdder], conversations: Conversations, elsewhere: Callable[[], Iterable[Req]] = tuple
) -> type[PrefillAdder]:
    """A subclass of SGLang's PrefillAdder that reserves for compressed requests up to their bound.

    Rows of idle conversations make way for requests that are admitted; `elsewhere` returns those of other microbatches.
    """

    class BoundedPrefillAdder(adder):
        _chunk_in_progress = False
        _preempting: set[Req] | None = None

        def __init__(
            self, page_size, tree_cache, token_to_kv_pool_allocator, running_batch: ScheduleBatch, *args, **kwargs
        ):
            # SGLang asks for each request's growth in a call of its own.
            running = running_batch.reqs if running_batch else []
            growth, others = growth_in(running, page_size)
            with replaced(running_batch, "reqs", others) if running_batch else nullcontext():
                super().__init__(page_size, tree_cache, token_to_kv_pool_allocator, running_batch, *args, **kwargs)
            # SGLang reserves nothing for what runs in other microbatches.
            self.memory_budget.total_offset += growth + growth_in(list(elsewhere()), page_size)[0]
            if conversations.windows is not None:
                # SGLang reserves nothing there for what runs.
                self.memory_budget.swa_offset += conversations.windows.growth_in(running)

        def add_one_req(self, req, has_chunked_req, truncation_align_size):
            if settings_of(req) is None:
                return super().add_one_req(req, has_chunked_req, truncation_align_size)
            self._chunk_in_progress = has_chunked_req or self.new_chunked_req is not None
            acquired = conversations.acquire(req)
            # SGLang's other way to admit, for requests without stop conditions while the tree is off, knows no bound.
            with replaced(req.sampling_params, "ignore_eos", False):
                result = super().add_one_req(req, has_chunked_req, truncation_align_size)
            if self.can_run_list and self.can_run_list[-1] is req:
                conversations.commit(req, self._room_for_copy())
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
            # What the window layers' pool needs does not depend on the bound; the other pool's part has just been set.
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

        def _room_for_copy(self) -> int:
            """Slots that no request may still need, in each pool."""
            if conversations.windows is None:
                return self._room()
            return min(self._room(), int(self.memory_budget.remaining_swa))

        def _make_room(self, wanted) -> None:
            """Idle rows give way to a prefill that would not find `wanted` slots, for which nothing else might."""
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
