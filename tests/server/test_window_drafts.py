"""Speculative decoding of models with a sliding window in some layers, compressed."""

from __future__ import annotations

import pytest

from families import WINDOW
from family_servers import prepared, started
from harness import BUDGET, INTERVAL, KEYS_ALONE, assert_pool_is_whole, compression, prompt, two_cores
from ngram_account import DRAFTED, NGRAM, OVERLAP, PAGES, answer_by_account, favouring
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm

# Tokens of which answers consist, so that some drafts hold and some do not.
FEW = (10, 11, 12)
# Answers of these are one token: their logits are made by the embeddings, where each token is most like itself.
OF_ONE_TOKEN = ("gemma2", "gemma3", "cohere2")
CASES = [
    # Windows in the pool of the other layers ...
    wide("olmo3", 1, "overlap"),
    wide("olmo3", 16, "overlap off"),
    wide("gemma2", 16, "overlap"),
    wide("gemma3", 1, "overlap off"),
    wide("cohere2", 16, "overlap"),
    wide("exaone4", 1, "overlap"),
    # ... and in one of their own.
    wide("gpt-oss", 16, "overlap"),
    wide("gpt-oss", 1, "overlap"),
    wide("gpt-oss", 1, "overlap off"),
    wide("mimo-v2", 16, "overlap"),
    wide("step-3.5", 1, "overlap"),
    wide("mellum", 16, "overlap off"),
]


@pytest.mark.parametrize(("family", "page_size", "schedule"), CASES)
def test_logits(serve, probed, tmp_path, family, page_size, schedule):
    """Prevents a window that is cut short, or shows evicted tokens, where drafted tokens are verified after a round,
    and K/V of accepted ones that window layers lose."""
    tiny, account = prepared(tmp_path, family)
    flags = (*NGRAM, *PAGES[page_size], *OVERLAP[schedule], *KEYS_ALONE)
    client, steps = started(probed, tiny, family, *flags, env={"SGLANG_SWA_EVICTION_INTERVAL": "8"})
    answer = answer_by_account(client, steps, account, page_size, schedule, prompt(5, 50), 460, FEW)
    assert answer.rounds >= 5
    # Where drafts hold in full, in part, and not at all.
    accepted = {DRAFTED} if family in OF_ONE_TOKEN else {1, 2, DRAFTED}
    assert accepted <= set(answer.accepted)
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
def test_logits_on_two_ranks(serve, probed, tmp_path):
    """Prevents the same where each rank has heads, and pools, of its own."""
    tiny, account = prepared(tmp_path, "mimo-v2")
    flags = (*NGRAM, *PAGES[16], *KEYS_ALONE, "--tp-size", "2")
    client, steps = started(probed, tiny, "mimo-v2", *flags, env=two_cores())
    answer = answer_by_account(client, steps, account, 16, "overlap", prompt(5, 50), 460, FEW)
    assert answer.rounds >= 5
    assert {1, DRAFTED} <= set(answer.accepted)
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(("family", "page_size"), [("olmo3", 16), ("gpt-oss", 1)])
def test_bit_identical_below_the_trigger(serve, tmp_path, family, page_size):
    """Prevents compression from changing an answer, a log-probability or an acceptance before it has evicted."""
    tiny, _ = prepared(tmp_path, family)
    flags = (*NGRAM, *PAGES[page_size])
    client, plain = (started(serve, tiny, family, *flags, compressed=compressed) for compressed in (True, False))
    accepted = 0
    for ids in (prompt(1, 60), prompt(2, 31)):
        ours, theirs = (
            each.generate(ids, BUDGET + INTERVAL, logprobs=True, **favouring(FEW)) for each in (client, plain)
        )
        assert compression(ours)["rounds"] == 0
        for name in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
            assert ours["meta_info"][name] == theirs["meta_info"][name], name
        assert ours["output_ids"] == theirs["output_ids"]
        accepted += ours["meta_info"]["spec_num_correct_drafts"]
    assert accepted > 20
    serve.stop(client)
    serve.stop(plain)


@pytest.mark.wide
@pytest.mark.parametrize(("family", "page_size"), [("olmo3", 16), ("gpt-oss", 16), ("gpt-oss", 1)])
def test_storm(serve, tmp_path, family, page_size):
    """Prevents slots for drafts that are lost or owned twice, in either pool, and one that is given back while window
    layers still read it, where requests are aborted, retracted, resumed and compacted while they are prefilled."""
    tiny, account = prepared(tmp_path, family)
    flags = (*NGRAM, *PAGES[page_size], "--max-total-tokens", "1024", *FLAGS)
    env = {**RETRACTING, "SGLANG_SWA_EVICTION_INTERVAL": "16"}
    client = started(serve, tiny, family, *flags, env=env)
    _, finished = storm(client, 7, 40, (WINDOW + 1, account.budget), 1500, conversations=6, favoured=FEW)
    assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in finished) > 66
    assert_withstood(client, finished, 40)
    serve.stop(client)
