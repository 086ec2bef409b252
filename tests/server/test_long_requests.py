"""Requests too large for the pool: long answers, and private prompts that are compacted."""

from __future__ import annotations

import pytest

from harness import compression, prompt, served_logprobs
from oracle import TOLERANCE, oracle_of
from sets import wide

SMALL_POOL = ["--max-total-tokens", "768"]
WIDE = ["--triattention-budget", "256", "--triattention-interval", "64"]
COMPACT = {"triattention": {"prompt": "compact"}}


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_logits_of_a_prompt_compacted_chunk_by_chunk(serve, tiny, page_size):
    """Prevents wrong positions, tokens or kept sets when a prompt is prefilled onto a row that rounds shortened."""
    client = serve("--page-size", str(page_size), "--chunked-prefill-size", "128")
    client.flush()
    stem, ids = prompt(61, 48), prompt(62, 500)
    client.generate(stem, 1)
    for whole, cached in ((ids, 0), (stem + ids, 48)):
        response = client.generate(whole, 120, logprobs=True, custom_params=COMPACT)
        report, frozen = compression(response), max(cached, 4)
        assert report["frozen_length"] == frozen
        assert response["meta_info"]["cached_tokens"] == cached
        expected, rounds = oracle_of(tiny).logprobs(
            whole + response["output_ids"][:-1], len(whole), frozen, cached=cached, chunk=128
        )
        assert report["rounds"] == rounds >= 6
        values, tokens = served_logprobs(response)
        assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    # The tree may hold no more of it than before.
    again = client.generate(stem + ids, 1)
    assert again["meta_info"]["cached_tokens"] == 48


def test_answer_longer_than_the_pool(serve):
    """Prevents the pool size from ending an answer whose row stays within its bound."""
    ids = prompt(63, 40)
    response = serve(*SMALL_POOL, *WIDE).generate(ids, 1000 - len(ids))
    report = compression(response)
    assert report["logical_length"] == 1000 - 1
    assert report["physical_length"] <= 40 + 256 + 64
    dense = serve(*SMALL_POOL, compressed=False).generate(ids, 1000 - len(ids))
    assert dense["meta_info"]["completion_tokens"] < 768


def test_private_prompt_longer_than_the_pool(serve):
    """Prevents a prompt that is compacted from being refused because of the pool size."""
    client = serve(*SMALL_POOL, *WIDE)
    ids = prompt(64, 2400)
    response = client.generate(ids, 200, custom_params=COMPACT)
    report = compression(response)
    assert len(response["output_ids"]) == 200
    assert report["logical_length"] == 2400 + 199
    assert response["meta_info"]["prompt_tokens"] == 2400
    refused = client.post("/generate", input_ids=ids, sampling_params={"max_new_tokens": 8})
    assert refused.status_code == 400
    assert "--triattention-prompt compact" in refused.json()["error"]["message"]
