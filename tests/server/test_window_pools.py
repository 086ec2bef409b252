"""Models whose window layers have a KV pool of their own (gpt-oss), against the same account as others with windows."""

from __future__ import annotations

import pytest

from families import WINDOW
from family_servers import compare_with_account, prepared, started
from harness import assert_pool_is_whole, compression, prompt, served_logprobs
from oracle import TOLERANCE
from storm import FLAGS, RETRACTING, retractions, storm

CASES = [
    *(("gpt-oss", page_size, selection) for page_size in (1, 16) for selection in ("per-layer-head", "shared-mean")),
    ("gpt-oss", 64, "per-layer-head"),
    *(("mimo-v2", 1, "shared-mean"), ("mimo-v2", 16, "per-layer-head"), ("mimo-v2", 64, "per-layer-head")),
    *(("step-3.5", 1, "shared-mean"), ("step-3.5", 16, "per-layer-head"), ("step-3.5", 64, "per-layer-head")),
]


@pytest.mark.parametrize(("family", "page_size", "selection"), CASES)
def test_logits_equal_a_forward_pass_masked_by_layer(serve, tmp_path, family, page_size, selection):
    """Prevents window layers from reading slots of the other pool, slots that were given back, or other tokens than
    the newest; and rounds from touching any but the layers that see all tokens."""
    for report in compare_with_account(serve, tmp_path, family, page_size, selection):
        assert report["freed_slots"] == report["evicted_tokens"] > 0


def test_answer_longer_than_either_pool(serve, tmp_path):
    """Prevents slots of one pool from waiting for the other to be freed."""
    tiny, _ = prepared(tmp_path, "gpt-oss")
    flags = ("--page-size", "16", "--max-total-tokens", "640", "--swa-full-tokens-ratio", "0.4")
    client = started(serve, tiny, "gpt-oss", *flags)
    ids = prompt(63, 40)
    response = client.generate(ids, 1200)
    report = compression(response)
    assert len(response["output_ids"]) == 1200
    assert report["physical_length"] + report["evicted_tokens"] == report["logical_length"] == len(ids) + 1199
    assert report["freed_slots"] == report["evicted_tokens"] > 640
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.parametrize(("page_size", "ratio", "interval"), [(16, 0.8, 16), (1, 0.2, 128)])
def test_storm(serve, tmp_path, page_size, ratio, interval):
    """Prevents leaks in either pool, hangs, and a slot that is given back while window layers still read it."""
    tiny, account = prepared(tmp_path, "gpt-oss")
    flags = ("--page-size", str(page_size), "--max-total-tokens", "1024", "--swa-full-tokens-ratio", str(ratio))
    env = {**RETRACTING, "SGLANG_SWA_EVICTION_INTERVAL": str(interval)}
    client = started(serve, tiny, "gpt-oss", *flags, *FLAGS, env=env)
    _, finished = storm(client, 1, 80, (WINDOW, account.budget), 1500, conversations=6)
    assert len(finished) > 40
    assert retractions(finished) > 3
    assert client.totals()["rounds"] > 30
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.parametrize("selection", ["per-layer-head", "shared-mean"])
def test_turn_that_resumes_and_prompt_that_is_compacted(serve, tmp_path, selection):
    """Prevents a window that is cut short where SGLang counts all tokens of a request and its row holds fewer: in a
    later turn, between the chunks of a prefill, and wherever SGLang frees what is behind the window."""
    tiny, account = prepared(tmp_path, "gpt-oss")
    account.selection = selection
    flags = ("--triattention-selection", selection, "--chunked-prefill-size", "96")
    client = started(serve, tiny, "gpt-oss", *flags, env={"SGLANG_SWA_EVICTION_INTERVAL": "8"})

    def worst(ids, response, prompt_length, frozen, **how):
        expected, rounds = account.logprobs(ids + response["output_ids"][:-1], prompt_length, frozen, **how)
        values, tokens = served_logprobs(response)
        return (expected[-len(tokens) :].gather(1, tokens) - values).abs().max(), rounds

    ids = prompt(31, 48)
    named = {"triattention": {"conversation": "long"}}
    first = client.generate(ids, 250, custom_params=named)
    following = ids + first["output_ids"] + prompt(32, 40)
    second = client.generate(following, 250, logprobs=True, custom_params=named)
    assert compression(second)["conversation"] == "resumed"
    # The message is prefilled in one piece, and rounds wait until that is done.
    pause = (len(ids) + 249, len(following) + 1)
    error, rounds = worst(following, second, 48, 48, pauses=[pause])
    assert rounds >= 10
    assert error < TOLERANCE

    whole = prompt(62, 500)
    response = client.generate(whole, 120, logprobs=True, custom_params={"triattention": {"prompt": "compact"}})
    error, rounds = worst(whole, response, len(whole), 4, chunk=96)
    assert compression(response)["rounds"] == rounds >= 6
    assert error < TOLERANCE
    # No part of a compacted row is in the tree.
    again = client.generate(whole, 1)
    assert again["meta_info"]["cached_tokens"] == 0
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {"conversation": "long", "release": True}})
    assert_pool_is_whole(client)
    serve.stop(client)
