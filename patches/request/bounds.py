"""How much KV a compressed request can hold at most, and whether compaction rounds may shorten its prefill.

SGLang part: `Req` (sglang/srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.request.compressed import (
    compression_of,
    compressions_of,
    frozen_of,
    inputs_of,
    settings_in_use,
)
from sglang_triattn.patches.request.fields import wants_prompt_logprobs
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.rounds.plan import ceil_align, max_kv_tokens
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


def logical_end(request: Req) -> int:
    """Most tokens that the request computes, prompt included."""
    return len(request.origin_input_ids) + max(longest_answer(request) - 1, 0)


def longest_answer(request: Req) -> int:
    """Tokens that a request may generate; SGLang sets a limit for requests that come without one."""
    return cast(int, request.sampling_params.max_new_tokens)


def max_kv_tokens_of(request: Req, page_size: int) -> int:
    """Most KV entries that a request with settings holds while it decodes, reserve included, as far as known now.

    Of a request that holds a row, its CompressedRequest keeps the number: admission asks for it again and again.
    """
    compression, kv = compression_of(request), request.kv
    if not kv.holds_kv:
        return _bound(request, compression, page_size, least=request.prefix_len + request.host_hit_length)
    limit = longest_answer(request)
    if compression.bound_protected != kv.cache_protected_len or compression.bound_limit != limit:
        compression.know_bound(_bound(request, compression, page_size), kv.cache_protected_len, limit)
    return compression.bound


def _bound(request: Req, compression: CompressedRequest, page_size: int, least: int = 0) -> int:
    """The bound of a request of whose row at least `least` entries are frozen."""
    settings = cast(RoundRules, compression.settings)
    frozen = max(frozen_of(request, settings, page_size, compression), least)
    evicted = compression.evicted_tokens
    bound = max_kv_tokens(
        settings,
        frozen=frozen,
        logical_end=logical_end(request) - evicted,
        evicted_before=evicted,
        page_size=page_size,
        inputs=inputs_of(compression),
    )
    return bound + compression.reserve


def growth_of(request: Req, page_size: int, *, held: int, computed: int | None = None) -> int:
    """Slots, in whole pages, that a request may still take on top of `held` entries.

    At least those of one step: what was prefilled at once may exceed the bound until the first round.

    Args:
        computed: how many of the entries are computed; by default all.
    """
    step_end = (held if computed is None else computed) + max(compression_of(request).reserve, 1)
    most = ceil_align(max(max_kv_tokens_of(request, page_size), step_end), page_size)
    return max(most - ceil_align(held, page_size), 0)


def growth_in(requests: Sequence[Req], page_size: int) -> tuple[int, list[Req]]:
    """The sum of `growth_of` over running requests, at what they hold now; and those that are not compressed.

    In one loop without calls, because SGLang asks in every step in which a request waits, of every running one.
    """
    total, others = 0, []
    for request, compression in zip(requests, compressions_of(requests), strict=True):
        kv = request.kv
        known = compression.bound_protected == kv.cache_protected_len
        if known and compression.bound_limit == request.sampling_params.max_new_tokens:
            most = compression.bound
        elif compression.settings is None:
            others.append(request)
            continue
        else:
            most = max_kv_tokens_of(request, page_size)
        step_end, held = kv.kv_committed_len + (compression.reserve or 1), kv.kv_allocated_len
        most = most if most > step_end else step_end
        growth = most - held if page_size == 1 else ceil_align(most, page_size) - ceil_align(held, page_size)
        if growth > 0:
            total += growth
    return total, others


def reserved_of(row: CompressedRow) -> int:
    """Slots, in whole pages, that a running request holds or may still take."""
    return ceil_align(max(max_kv_tokens_of(row.request, row.page_size), row.kv.kv_allocated_len), row.page_size)


def can_prefill_in_rounds(request: Req) -> bool:
    """Whether rounds may run between the chunks of a request's prefill.

    Rounds change the places by which a prompt's log-probabilities and embeddings are looked up.
    """
    compacts_prompt = settings_in_use(request).prompt == "compact"
    return (
        not (compacts_prompt and wants_prompt_logprobs(request))
        and request.input_embeds is None
        and request.positional_embed_overrides is None
    )
