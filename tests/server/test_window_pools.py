"""Models whose window layers have a KV pool of their own, on two ranks, in later turns and with prompts that are
compacted; `test_families` has one rank."""

from __future__ import annotations

import pytest

from family_servers import compare_with_account, prepared, started
from harness import assert_pool_is_whole, compression, prompt, served_logprobs, two_cores
from oracle import TOLERANCE
from sets import wide


@pytest.mark.wide
@pytest.mark.parametrize(("family", "selection"), [("mimo-v2", "per-layer-head"), ("gemma-4", "shared-mean")])
def test_logits_on_two_ranks(serve, tmp_path, family, selection):
    """Prevents a rank from scoring by another's heads where layers of one model have different numbers of them."""
    compare_with_account(serve, tmp_path, family, 1, selection, "--tp-size", "2", env=two_cores())


@pytest.mark.parametrize("page_size", [1, wide(16)])
def test_rows_that_stay_in_order(serve, tmp_path, page_size):
    """Prevents K/V of window layers from going elsewhere where rounds move all older tokens."""
    compare_with_account(serve, tmp_path, "gpt-oss", page_size, "per-layer-head", "--triattention-recency", "0.5")


@pytest.mark.parametrize("selection", ["per-layer-head", wide("shared-mean")])
def test_turn_that_resumes_and_prompt_that_is_compacted(serve, tmp_path, selection):
    """Prevents a window that is cut short where SGLang counts all tokens of a request and its row holds fewer: in a
    later turn, between the chunks of a prefill, and wherever SGLang frees what has left the window."""
    tiny, account = prepared(tmp_path, "gpt-oss")
    account.selection = selection
    flags = ("--triattention-selection", selection, "--chunked-prefill-size", "96")
    client = started(serve, tiny, "gpt-oss", *flags, env={"SGLANG_SWA_EVICTION_INTERVAL": "8"})

    def worst(ids, response, prompt_length, frozen, **how):
        expected, rounds = account.logprobs(ids + response["output_ids"][:-1], prompt_length, frozen, **how)
        values, tokens = served_logprobs(response)
        return (expected[-len(tokens) :].gather(1, tokens) - values).abs().max(), rounds

    ids = prompt(31, 48)
    named = {"triattention": {"conversation": "long", "turn_inputs": "compact"}}
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
