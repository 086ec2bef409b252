"""Steps that prefill prompts and decode other requests (--enable-mixed-chunk)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import BUDGET, INTERVAL, KEYS_ALONE, assert_pool_is_whole, compression, prompt
from oracle import TOLERANCE, oracle_of
from storm import FLAGS, RETRACTING, retractions, storm

MIXED = "--enable-mixed-chunk"


@pytest.mark.parametrize(("page_size", "selection"), [(1, "shared-mean"), (16, "per-layer-head")])
def test_rounds_in_mixed_steps(probed, tiny, page_size, selection):
    """Prevents requests that grow past their bound for as long as prompts are being prefilled, rounds at other moments
    than in pure decode steps, and wrong positions in mixed steps.

    SGLang mixes nothing while log-probabilities are asked for, so the account's best tokens are compared.
    """
    flags = ("--triattention-selection", selection, *KEYS_ALONE, "--chunked-prefill-size", "64")
    client, steps = probed(MIXED, "--page-size", str(page_size), *flags)
    client.flush()
    steps()
    stem = prompt(51, 32)
    client.generate(stem, 1)
    prompts = [stem + prompt(52 + n, 17 + n) for n in range(3)]
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(client.generate_all, prompts, 300)
        others = [pool.submit(client.generate, prompt(60 + n, 1500), 2) for n in range(8)]
        answers = answers.result()
        assert all(len(other.result()["output_ids"]) == 2 for other in others)

    account = oracle_of(tiny)
    account.selection, account.value_share = selection, 0.0
    mixed = [step["mixed"] for step in steps() if "mixed" in step]
    for ids, response in zip(prompts, answers, strict=True):
        frozen, output = len(ids) - len(ids) % page_size, response["output_ids"]
        lengths = [lengths[response["meta_info"]["id"]] for lengths in mixed if response["meta_info"]["id"] in lengths]
        # Long enough for several rounds, while nothing but mixed steps ran.
        assert len(lengths) > 3 * INTERVAL
        assert max(lengths) <= frozen + BUDGET + INTERVAL
        expected, rounds = account.logprobs(ids + output[:-1], len(ids), frozen)
        assert compression(response)["rounds"] == rounds >= 5
        best = expected.max(-1)
        chosen = expected.gather(1, expected.new_tensor(output).long()[:, None])[:, 0]
        assert (best.values - chosen).max() < 2 * TOLERANCE
    assert_pool_is_whole(client)


def test_answers_below_the_trigger(serve):
    """Prevents compression from changing an answer, a log-probability or a prefix hit before it has evicted."""
    flags = (MIXED, "--page-size", "16", "--chunked-prefill-size", "64")
    client, plain = serve(*flags), serve(*flags, compressed=False)
    stem = prompt(1, 90)
    for ids in (stem, stem + prompt(3, 50)):
        ours, theirs = (each.generate(ids, BUDGET, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    assert ours["meta_info"]["cached_tokens"] == 80


@pytest.mark.wide
def test_storm_of_mixed_steps(serve):
    """Prevents leaks, hangs and lengths that disagree where requests are aborted or retracted out of mixed steps."""
    client = serve(MIXED, "--page-size", "16", "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 7, 60, (24, BUDGET), 1500, conversations=6)
    assert len(finished) > 30
    assert retractions(finished) > 3
    assert client.totals()["rounds"] > 20
    assert_pool_is_whole(client)
