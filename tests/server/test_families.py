"""Models whose attention differs from a Llama's, against an account that masks each of their layers on its own."""

from __future__ import annotations

import pytest

from families import WINDOW
from family_servers import RECENT, prepared, started
from harness import assert_pool_is_whole, compression, prompt, served_logprobs
from oracle import TOLERANCE, Oracle
from storm import FLAGS, RETRACTING, retractions, storm

CASES = [
    ("gemma3", 1, "per-layer-head"),
    ("gemma3", 16, "shared-mean"),
    ("gemma2", 16, "per-layer-head"),
    ("gemma2", 1, "shared-mean"),
    ("olmo3", 1, "union"),
    ("olmo3", 64, "per-head"),
    ("exaone4", 16, "per-layer-head"),
    ("cohere2", 1, "shared-mean"),
    ("smollm3", 16, "per-layer-head"),
    ("seed-oss", 16, "per-layer-head"),
    ("dots1", 1, "shared-mean"),
    ("nemotron-nas", 16, "per-layer-head"),
]


@pytest.mark.parametrize(("family", "page_size", "selection"), CASES)
def test_logits_equal_a_forward_pass_masked_by_layer(serve, tmp_path, family, page_size, selection):
    """Prevents window layers from seeing tokens across a gap that a round has made, or others than the newest; their
    keys from being scored; and K/V that they still read from being moved."""
    tiny, account = prepared(tmp_path, family)
    account.selection = selection
    tokens = 280
    if page_size > 16:
        # Kept besides the newest tokens is at least the rest of the page in which they begin; a round frees a page.
        account.budget, account.interval = RECENT + page_size - 1, page_size
        tokens = 450
    client = started(serve, tiny, family, "--page-size", str(page_size), "--triattention-selection", selection)
    stem = prompt(8, 40)
    prompts = [stem + prompt(20 + i, length) for i, length in enumerate((3, 24))]
    client.generate(stem, 1)
    for ids, response in zip(prompts, client.generate_all(prompts, tokens, logprobs=True), strict=True):
        report = compression(response)
        frozen = len(ids) - len(ids) % page_size
        assert report["frozen_length"] == max(frozen, 4)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = account.logprobs(everything, len(ids), report["frozen_length"])
        assert report["rounds"] == rounds >= 5
        values, top = served_logprobs(response)
        assert (expected.gather(1, top) - values).abs().max() < TOLERANCE
        dense, _ = Oracle(**{**vars(account), "budget": 10_000}).logprobs(everything, len(ids), frozen)
        assert (dense.gather(1, top) - values).abs().max() > 50 * TOLERANCE
    assert_pool_is_whole(client)
    serve.stop(client)


def test_storm_on_a_model_with_windows(serve, tmp_path):
    """Prevents leaks and hangs where rounds must evict whole pages, and a conversation's next turn out of order."""
    tiny, account = prepared(tmp_path, "gemma3")
    client = started(serve, tiny, "gemma3", "--page-size", "16", "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 1, 80, (WINDOW, account.budget), 1500, conversations=6)
    assert len(finished) > 40
    assert retractions(finished) > 3
    assert client.totals()["rounds"] > 30
    assert_pool_is_whole(client)
    serve.stop(client)
