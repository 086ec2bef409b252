"""What compression knows of a request. SGLang part: `Req` (sglang/srt/managers/schedule_batch.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_triattn.config import Config
from sglang_triattn.request_settings import Asked
from sglang_triattn.rounds import Report, RequestState, frozen_length, in_pages

_ASKED = "triattention_asked"
_WITHHELD = "triattention_withheld"
_STATE = "triattention_state"
_REPORT = "triattention_report"
_NOTHING_ASKED = Asked(None)


def set_report(request: Any, report: Report) -> None:
    """What `meta_info` will say of a request that gives its row back."""
    setattr(request, _REPORT, report)


def adopt(request: Any, asked: Asked) -> None:
    """Lets a new request be compressed as it asked.

    A prompt to be compacted is kept out of the tree, which would freeze it.
    """
    setattr(request, _ASKED, asked)
    setattr(request, _WITHHELD, request.skip_radix_cache_insert)
    if asked.settings is not None and asked.settings.prompt == "compact":
        request.skip_radix_cache_insert = True


def withhold_as_at_arrival(request: Any) -> None:
    """Lets the tree take the request's row, unless SGLang itself keeps it out."""
    request.skip_radix_cache_insert = getattr(request, _WITHHELD)


def tokens_tell_all(request: Any) -> bool:
    """Whether a request's K/V is what its token ids determine, so that another with these ids may have it."""
    return not getattr(request, _WITHHELD) and request.input_embeds is None


def asked_of(request: Any) -> Asked:
    """What the request asked for; of one that never arrived by SGLang's usual way, nothing."""
    return getattr(request, _ASKED, _NOTHING_ASKED)


def settings_of(request: Any) -> Config | None:
    """Settings of a request that may be compressed, None of any other (beam search, compression declined)."""
    return asked_of(request).settings if request.beam_group is None else None


def state_of(request: Any) -> RequestState:
    """The state of the request's current row."""
    state = getattr(request, _STATE, None)
    if state is None:
        state = RequestState()
        setattr(request, _STATE, state)
    return state


def begin_state(request: Any, state: RequestState) -> None:
    """Gives the request a row on which rounds ran before, in an earlier turn."""
    state.rounds = state.freed_slots = 0
    # Its settings may be others than those of the turn before.
    state.due_protected = -1
    setattr(request, _STATE, state)


def drop_state(request: Any) -> None:
    """Forgets the request's row."""
    delattr(request, _STATE)


def evicted_of(request: Any) -> int:
    """Tokens evicted from the request's current row."""
    state = getattr(request, _STATE, None)
    return 0 if state is None else state.evicted_tokens


def report_of(request: Any) -> Report | None:
    """What compression did to a request that has given its row back; None before."""
    return getattr(request, _REPORT, None)


def frozen_of(request: Any, settings: Config, page_size: int) -> int:
    """First position of the request's row that a round may touch."""
    return frozen_length(settings, request.kv.cache_protected_len, prompt_length_of(request), page_size)


def prompt_length_of(request: Any) -> int:
    """Tokens of the prompt behind which the row's private part began, that of the first turn in a resumed row."""
    state = getattr(request, _STATE, None)
    if state is None or state.prompt_length is None:
        return len(request.origin_input_ids)
    return state.prompt_length


def long_enough(requests: Sequence[Any]) -> list[int]:
    """Indices of the requests that may have outgrown their budget, as far as two comparisons of integers tell.

    Called for every request in every step; only a few have a round.
    """
    found = []
    for index, request in enumerate(requests):
        kv, state = request.kv, getattr(request, _STATE, None)
        if state is None or kv.kv_allocated_len >= state.due_length or kv.cache_protected_len != state.due_protected:
            found.append(index)
    return found


def wait_until_due(request: Any, page_size: int) -> None:
    """Lets `long_enough` leave out a request that has settings and no round now, until its row has grown enough."""
    state, settings = state_of(request), settings_of(request)
    frozen = frozen_of(request, settings, page_size)
    state.due_length = frozen + settings.trigger(frozen)
    state.due_protected = request.kv.cache_protected_len


def lengths_of(request: Any, page_size: int) -> dict[str, int]:
    """What a plan is made of, see `sglang_triattn.rounds.plan_round`; the request has settings and holds a row."""
    return {
        "frozen": frozen_of(request, settings_of(request), page_size),
        "length": request.kv.kv_allocated_len,
        "evicted_before": evicted_of(request),
        "page_size": page_size,
    }


def rows_of(request: Any) -> int:
    """Rows that a request takes: one for each of its beams."""
    return 1 if request.beam_group is None else request.beam_group.beam_width


def recent_of(request: Any) -> int:
    """Newest tokens that a round of a request with settings keeps: what was asked for, as far as the order tells.

    Fewer only where little came since a round that mixed up the order of all: at page sizes above 1, early rounds, and
    turns with other settings.
    """
    return min(settings_of(request).recent, request.kv.kv_allocated_len - state_of(request).mixed_length)


def free_tail(kv: Any, length: int, tree_cache: Any) -> None:
    """Frees the pages of a row that lie wholly behind its first `length` entries."""
    first_empty = in_pages(length, tree_cache.page_size)
    if first_empty < kv.kv_allocated_len:
        tree_cache.free_kv_row(kv, [(first_empty, kv.kv_allocated_len)])


def wants_prompt_logprobs(request: Any) -> bool:
    """Whether log-probabilities of prompt tokens were asked for, which are looked up by the tokens' places."""
    return request.return_logprob and 0 <= request.logprob_start_len < len(request.origin_input_ids)


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
