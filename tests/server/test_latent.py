"""Models with latent KV (MLA) on several ranks or stages, below the budget and in a storm; `test_families` has one
rank."""

from __future__ import annotations

import pytest

from family_servers import compare_with_account, prepared, started
from harness import STAGES, TWO_GROUPS, assert_pool_is_whole, compression, prompt, two_cores
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm

TWO_RANKS = ("--tp-size", "2")
# The last entry says how many ranks choose for themselves.
CASES = [
    wide("deepseek-v3", 1, "per-layer-head", STAGES, 1),
    wide("kimi-k2", 32, "per-layer-head", TWO_RANKS, 2),
    wide("deepseek-v3", 1, "shared-mean", TWO_GROUPS, 1),
]


@pytest.mark.parametrize(("family", "page_size", "selection", "flags", "ranks"), CASES)
def test_logits_equal_a_forward_pass_masked_by_layer(serve, tmp_path, family, page_size, selection, flags, ranks):
    """Prevents scores of the wrong dims of a row, without YaRN's scaling or by another rank's queries; rows that are
    moved in part; and tokens that are chosen by values."""
    compare_with_account(serve, tmp_path, family, page_size, selection, *flags, env=two_cores(), ranks=ranks)


FAMILY, SMALL_POOL = "deepseek-v3", ("--page-size", "32", "--max-total-tokens", "1536", *FLAGS)


@pytest.mark.wide
def test_answers_below_the_budget(serve, tmp_path):
    """Prevents answers below the budget, or prefix hits, from differing from plain SGLang's; and the share of values
    that other models have."""
    tiny, account = prepared(tmp_path, FAMILY)
    client = started(serve, tiny, FAMILY, *SMALL_POOL, env=RETRACTING)
    plain = started(serve, tiny, FAMILY, *SMALL_POOL, env=RETRACTING, compressed=False)
    stem = prompt(1, 70)
    for ids in (stem, stem + prompt(2, 30), stem + prompt(3, 9)):
        ours, theirs = (server.generate(ids, account.budget, logprobs=True) for server in (client, plain))
        assert compression(ours)["rounds"] == 0
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    assert ours["meta_info"]["cached_tokens"] == 64
    serve.stop(plain)
    assert client.totals()["value_share"] == 0
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
def test_storm(serve, probed, tmp_path):
    """Prevents latents of a frozen prefix from being written, and leaks."""
    tiny, account = prepared(tmp_path, FAMILY)
    client, steps = started(probed, tiny, FAMILY, *SMALL_POOL, env=RETRACTING, contents=True)
    _, finished = storm(client, 1, 40, (account.recent + 1, account.budget), 1500, conversations=4)
    assert_withstood(client, finished, 40)
    frozen = {}
    for step in steps():
        for request in step["requests"]:
            if request["protected"]:
                key = request["rid"], request["retractions"], request["protected"]
                frozen.setdefault(key, set()).add(request["checksum"])
    assert len(frozen) > 20
    assert all(len(checksums) == 1 for checksums in frozen.values())
    assert_pool_is_whole(client)
    serve.stop(client)
