"""What running requests may still take, while what it follows from changes; and their batch's lengths."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from request_cases import COMPACT, CONFIG, REPORT
from sglang_triattn.patches.request.batch_lengths import FEW, shortened
from sglang_triattn.patches.request.bounds import growth_in, growth_of, max_kv_tokens_of
from sglang_triattn.patches.request.compressed import attach_options, compression_of
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.plan import Plan

PROMPT, ANSWER = 10, 400


class Request(SimpleNamespace):
    """What is read of SGLang's Req, which compares by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


def served(length: int, *, protected: int = 8, settings=CONFIG, reserve: int = 0) -> Request:
    """A request that decodes and holds `length` entries, `protected` of them the tree's."""
    kv = SimpleNamespace(
        kv_committed_len=length, kv_allocated_len=length + reserve, cache_protected_len=protected, holds_kv=True
    )
    params = SimpleNamespace(max_new_tokens=ANSWER)
    found = Request(
        beam_group=None, skip_radix_cache_insert=False, kv=kv, origin_input_ids=range(PROMPT), sampling_params=params
    )
    attach_options(found, CompressionOptions(settings), reserve).admit(PROMPT, None)
    return found


def bound(request: Request) -> int:
    """The bound from the lengths as they are."""
    compression, rules = compression_of(request), compression_of(request).settings
    frozen = max(request.kv.cache_protected_len, rules.sinks, PROMPT if rules.prompt == "frozen" else 0)
    end = PROMPT + request.sampling_params.max_new_tokens - 1 - compression.evicted_tokens
    return min(frozen + rules.trigger(frozen), end) + compression.reserve


CHANGES = {
    "the tree takes more": lambda request: setattr(request.kv, "cache_protected_len", 60),
    "the answer is limited": lambda request: setattr(request.sampling_params, "max_new_tokens", 30),
    "a round": lambda request: compression_of(request).round(Plan(10, 395, 20, 395, 375), lambda: 10, 0),
    "a failed round": lambda request: compression_of(request).fail(380),
    "another row": lambda request: (
        compression_of(request).round(Plan(10, 395, 20, 395, 375), lambda: 10, 0),
        max_kv_tokens_of(request, 1),
        compression_of(request).retract(REPORT),
        compression_of(request).admit(PROMPT, None),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("settings", [CONFIG, COMPACT, replace(CONFIG, sinks=40)], ids=["frozen", "compact", "sinks"])
def test_a_bound_follows_what_it_depends_on(change, settings):
    """Prevents admission from reserving what a request once needed."""
    request = served(50, settings=settings, reserve=3)
    before = max_kv_tokens_of(request, 1)
    assert before == max_kv_tokens_of(request, 1) == bound(request)
    CHANGES[change](request)
    assert max_kv_tokens_of(request, 1) == bound(request)


@pytest.mark.parametrize("page_size", [1, 16])
def test_the_sum_is_that_of_the_requests(page_size):
    """Prevents a sum that leaves a request out, or that counts one that holds more than its bound as negative."""
    requests = [
        *(served(length, protected=0, reserve=reserve) for length in (20, 50, 131) for reserve in (0, 5)),
        served(900),
        *(served(50, settings=None) for _ in range(2)),
    ]
    for _ in range(2):
        growth, others = growth_in(requests, page_size)
        assert others == requests[-2:]
        assert growth == sum(
            growth_of(each, page_size, held=each.kv.kv_allocated_len, computed=each.kv.kv_committed_len)
            for each in requests[:-2]
        )
        assert growth > 0
    assert growth_in([], page_size) == (0, [])


@pytest.mark.parametrize("rounds", [1, FEW, FEW + 1])
@pytest.mark.parametrize("on_host", [True, False], ids=["host", "device alone"])
def test_a_batch_is_shortened_where_it_had_rounds(rounds, on_host):
    """Prevents lengths of other requests, of beams after them, or of a request in another batch from changing."""
    requests = [served(50) for _ in range(20)]
    lengths = torch.arange(100, 123)
    host = lengths.int() if on_host else None
    batch = SimpleNamespace(reqs=requests, seq_lens=lengths.clone(), seq_lens_cpu=host)
    members = [(SimpleNamespace(request=requests[2 * place]), SimpleNamespace(evicted_tokens=place + 1))
               for place in range(rounds)]  # fmt: skip
    stranger = SimpleNamespace(request=served(50)), SimpleNamespace(evicted_tokens=1000)
    found = shortened(batch, [stranger, *members])
    expected = lengths.clone()
    expected[: 2 * rounds : 2] -= torch.arange(1, rounds + 1)
    assert torch.equal(found.on_device, expected)
    assert torch.equal(batch.seq_lens, lengths), "queued work still reads the old lengths"
    if on_host:
        assert found.on_host.dtype == torch.int32
        assert found.on_host.tolist() == expected.tolist()
        assert found.total == expected.sum()
    else:
        assert found.on_host is found.total is None
