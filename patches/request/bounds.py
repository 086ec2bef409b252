"""How much KV a compressed request can hold at most, and whether compaction rounds may shorten its prefill.

SGLang part: `Req` (sglang/srt/managers/schedule_batch.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.request.compressed import compression_of, frozen_of, inputs_of, settings_in_use
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
    """Most KV entries that a request with settings holds while it decodes, reserve included, as far as known now."""
    compression, settings = compression_of(request), settings_in_use(request)
    frozen = frozen_of(request, settings, page_size, compression)
    if not request.kv.holds_kv:
        frozen = max(frozen, request.prefix_len + request.host_hit_length)
    return _bound(request, compression, settings, frozen, page_size)


def _bound(request: Req, compression: CompressedRequest, settings: RoundRules, frozen: int, page_size: int) -> int:
    end, inputs = logical_end(request) - compression.evicted_tokens, inputs_of(compression)
    bound = max_kv_tokens(settings, frozen=frozen, logical_end=end, page_size=page_size, inputs=inputs)
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


def reserved_of(row: CompressedRow) -> int:
    """Slots, in whole pages, that a running request holds or may still take."""
    most = _bound(row.request, row.compression, row.settings, row.frozen, row.page_size)
    return ceil_align(max(most, row.kv.kv_allocated_len), row.page_size)


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
