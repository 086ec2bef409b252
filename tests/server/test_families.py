"""Models whose attention differs from a Llama's, against an account that masks each of their layers on its own."""

from __future__ import annotations

import pytest

from families import WINDOW
from family_servers import compare_with_account, prepared, started
from harness import assert_pool_is_whole
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
    compare_with_account(serve, tmp_path, family, page_size, selection)


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
