"""What a real scheduler holds, step by step: bounds, frozen bytes, and slots given back."""

from __future__ import annotations

import re

import pytest
import requests

from harness import BUDGET, INTERVAL, POOL, compression, prompt
from sets import wide


def requests_of(steps, rid):
    """What the probe wrote about one request, step by step; the server also runs warm-up requests of its own."""
    return [request for step in steps for request in step["requests"] if request["rid"] == rid]


@pytest.mark.parametrize("page_size", [wide(1), wide(16), 64])
def test_bounded_at_every_step_and_frozen_bytes_untouched(probed, page_size):
    """Prevents memory growth over a long trace, and any write to K/V that the tree owns.

    2,000 tokens at page size 1, fewer at the others; every decode step of the scheduler is checked.
    """
    client, steps = probed("--page-size", str(page_size), contents=True)
    ids, tokens = prompt(1, 150), 2000 if page_size == 1 else 500
    response = client.generate(ids, tokens)
    report, report_id = compression(response), response["meta_info"]["id"]
    frozen = len(ids) - len(ids) % page_size
    seen = requests_of(steps(), report_id)
    assert len(seen) >= tokens - 1
    assert max(request["physical"] for request in seen) <= frozen + BUDGET + INTERVAL
    assert all(request["attended"] == request["physical"] for request in seen)
    assert [request["logical"] for request in seen] == list(range(len(ids) + 1, len(ids) + len(seen) + 1))
    # With overlap, the prompt enters the tree while the first decode step is queued.
    assert {request["protected"] for request in seen[1:]} == {frozen}
    assert len({request["checksum"] for request in seen[1:]}) == 1

    assert report["rounds"] == (len(ids) + tokens - 1 - frozen - BUDGET) // INTERVAL
    assert report["evicted_tokens"] == report["rounds"] * INTERVAL
    assert report["logical_length"] - report["physical_length"] == report["evicted_tokens"]
    if page_size == 1:
        assert report["freed_slots"] == report["evicted_tokens"]
    assert report["freed_slots"] % page_size == 0


def test_evicted_slots_are_free_at_once(probed):
    """Prevents evicted tokens from staying allocated: the allocator's free count must jump when a round runs."""
    client, steps = probed("--page-size", "1")
    client.flush()
    steps()
    report_id = client.generate(prompt(2, 40), 300)["meta_info"]["id"]
    found = [step for step in steps() if [request["rid"] for request in step["requests"]] == [report_id]]
    assert len(found) >= 299
    for step in found:
        assert step["free"] == POOL - step["requests"][0]["physical"]


@pytest.mark.wide
def test_shared_prefix_stays_shared(serve):
    """Prevents requests with a common prefix from copying it, and compression of one from harming another."""
    client = serve("--page-size", "16")
    client.flush()
    stem = prompt(3, 160)
    alone = client.generate(stem + prompt(31, 9), 250)
    client.flush()
    client.generate(stem, 1)
    together = client.generate_all([stem + prompt(31 + i, 9) for i in range(4)], 250)
    assert all(response["meta_info"]["cached_tokens"] == 160 for response in together)
    assert all(compression(response)["rounds"] >= 4 for response in together)
    assert together[0]["output_ids"] == alone["output_ids"]


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_tree_never_serves_compacted_kv(serve, page_size):
    """Prevents K/V with holes, or computed after an eviction, from reaching a later request under token keys."""
    client = serve("--page-size", str(page_size))
    ids = prompt(4, 48)
    first = client.generate(ids, 300)
    assert compression(first)["rounds"] > 0
    turn = ids + first["output_ids"] + prompt(5, 20)

    warm = client.generate(turn, 20, logprobs=True)
    assert warm["meta_info"]["cached_tokens"] == 48
    client.flush()
    cold = client.generate(turn, 20, logprobs=True)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert warm["output_ids"] == cold["output_ids"]
    for one, other in zip(
        warm["meta_info"]["output_token_logprobs"], cold["meta_info"]["output_token_logprobs"], strict=True
    ):
        assert one[0] == pytest.approx(other[0], abs=1e-3)


@pytest.mark.wide
def test_totals_add_up(serve):
    """Prevents `/server_info` from disagreeing with the requests that it sums up."""
    client = serve("--page-size", "1")
    before = client.totals()
    responses = client.generate_all([prompt(50 + i, 10 + i) for i in range(5)], 220)
    after = client.totals()
    for name in ("rounds", "evicted_tokens", "freed_slots"):
        assert after[name] - before[name] == sum(compression(response)[name] for response in responses)
    assert (after["budget"], after["interval"], after["selection"]) == (BUDGET, INTERVAL, "per-layer-head")


def test_metrics_and_log_line(serve):
    """Prevents a server that compresses from looking like one that does not."""
    client = serve("--page-size", "1")
    client.generate(prompt(6, 10), 300)
    totals = client.totals()
    log = client.server.log_path.read_text()
    assert re.search(r"Decode batch.*triattn rounds: [1-9]\d*, evicted tokens: [1-9]\d*, freed slots: [1-9]\d*", log)
    metrics = requests.get(client.url + "/metrics", timeout=60).text
    for name in ("rounds", "evicted_tokens", "freed_slots"):
        line = next(line for line in metrics.splitlines() if line.startswith(f"sglang:triattention_{name}_total"))
        assert float(line.split()[-1]) == totals[name]
