"""A compressed request: SGLang's `Req` (sglang/srt/managers/schedule_batch.py) and this package's record of its life.

`compression_of` returns the `CompressedRequest`, which knows its stage and what may follow. What follows for SGLang is
written to `Req` here (whether the tree may take the row), in `row` (lengths, and who holds it), in `chunked_prefill`
(where a prefill continues) and in `failure`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, cast

from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.inputs import NO_INPUTS, TurnInputs
from sglang_triattn.rounds.plan import frozen_length
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_COMPRESSION = "triattention"
_attached = attrgetter(_COMPRESSION)
_NOT_COMPRESSED = CompressionOptions(None)


def attach_options(request: Req, options: CompressionOptions, reserve: int = 0) -> CompressedRequest:
    """Attaches `options` to an arriving request; one with beam search is not compressed.

    Args:
        reserve: see `CompressedRequest`.
    """
    options = options if request.beam_group is None else _NOT_COMPRESSED
    compression = CompressedRequest(options, withheld=request.skip_radix_cache_insert, reserve=reserve)
    setattr(request, _COMPRESSION, compression)
    if compression.settings is not None:
        write_tree_rule(request)
    return compression


def compression_of(request: Req) -> CompressedRequest:
    """The request's CompressedRequest; one without compression if it did not arrive by SGLang's usual way."""
    compression = getattr(request, _COMPRESSION, None)
    return attach_options(request, _NOT_COMPRESSED) if compression is None else compression


def compressions_of(requests: Sequence[Req]) -> list[CompressedRequest]:
    """The CompressedRequest of each request, at a tenth of the cost of as many calls of `compression_of`."""
    try:
        return list(map(_attached, requests))
    except AttributeError:
        return [compression_of(request) for request in requests]


def settings_of(request: Req) -> RoundRules | None:
    """Settings of a request that may be compressed; None for any other (beam search, compression declined)."""
    return compression_of(request).settings


def settings_in_use(request: Req) -> RoundRules:
    """Settings of a request that is compressed."""
    return cast(RoundRules, compression_of(request).settings)


def evicted_of(request: Req) -> int:
    """Tokens evicted from the request's current row."""
    return compression_of(request).evicted_tokens


def ids_determine_kv(request: Req) -> bool:
    """Whether token ids alone determine a request's K/V, so that another request with the same ids may reuse it."""
    return not compression_of(request).withheld and request.input_embeds is None


def frozen_of(request: Req, settings: RoundRules, page_size: int, compression: CompressedRequest | None = None) -> int:
    """First position of the request's row that a round may touch.

    Args:
        compression: that of the request, where it is at hand.
    """
    record = (compression or compression_of(request)).record
    prompt_len = len(request.origin_input_ids) if record is None else record.prompt_len
    return frozen_length(settings, request.kv.cache_protected_len, prompt_len, page_size)


def inputs_of(compression: CompressedRequest) -> TurnInputs:
    """The input tokens of resumed turns in the row that a request holds; none without a row."""
    return NO_INPUTS if compression.record is None else compression.record.inputs


def protected_of(compression: CompressedRequest, frozen: int, length: int, page_size: int) -> int:
    """Entries after the `frozen` ones, of the first `length` of its row, that are kept as input of resumed turns."""
    inputs = inputs_of(compression)
    first = min(inputs.target(frozen, page_size), length)
    return max(first - frozen, 0) + inputs.waiting_len(first, length)


def may_be_due(request: Req, compression: CompressedRequest) -> bool:
    """Whether a request may have outgrown its budget, as far as two comparisons of integers show it."""
    kv = request.kv
    return kv.kv_committed_len >= compression.due_len or kv.cache_protected_len != compression.due_protected


def long_enough(requests: Sequence[Req]) -> list[int]:
    """Indices of the compressed requests that may have outgrown their budget."""
    return [
        index
        for index, (request, compression) in enumerate(zip(requests, compressions_of(requests), strict=True))
        if may_be_due(request, compression) and compression.settings is not None
    ]


def write_tree_rule(request: Req) -> None:
    """Allows SGLang to give the whole row to the tree, or forbids it; called after every transition."""
    request.skip_radix_cache_insert = not compression_of(request).tree_may_take_all
