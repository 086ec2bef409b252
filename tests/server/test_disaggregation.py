"""Prefill and decode in servers of their own, of which the decode server compresses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from disaggregated_servers import (
    RETRACT,
    Retractions,
    Separated,
    assert_account,
    hold_to_account,
    running_separated,
    storm,
)
from harness import (
    BUDGET,
    INTERVAL,
    KEYS_ALONE,
    Client,
    assert_pool_is_whole,
    compression,
    greedy,
    prompt,
    two_cores,
)
from oracle import Oracle, oracle_of


@pytest.fixture(scope="module")
def pair(forkserver, tiny, tmp_path_factory):
    """Clients of a decode server that compresses and of one that does not, of page size 1."""
    folder = tmp_path_factory.mktemp("pair")
    with running_separated(forkserver, tiny, folder, "--page-size", "1", compressed=(True, False)) as clients:
        yield clients


@pytest.fixture(scope="module")
def retractions(tmp_path_factory):
    """What decode servers retract that have its `env`."""
    return Retractions(tmp_path_factory.mktemp("probe"))


@pytest.fixture(scope="module")
def retracting(forkserver, tiny, tmp_path_factory, retractions):
    """The client of a decode server that compresses, retracts requests now and then, and has a small pool."""
    folder = tmp_path_factory.mktemp("retracting")
    args = ("--page-size", "16", "--max-total-tokens", "2048")
    with running_separated(forkserver, tiny, folder, *args, env={**RETRACT, **retractions.env}) as (client,):
        yield client


def account_of(tiny, selection: str = "per-layer-head") -> Oracle:
    """The account of a server that chooses by keys alone."""
    return replace(oracle_of(tiny), value_share=0.0, selection=selection)


def cold_answer(client: Separated, ids: list[int]) -> dict:
    """An answer that ends at the trigger; the prefill server, which both decode servers share, has nothing cached."""
    client.prefill.flush()
    return client.generate(ids, BUDGET + INTERVAL, logprobs=True)


def test_answers_below_the_trigger(pair, serve):
    """Prevents K/V that arrives elsewhere or not at all, and compression that changes an answer before it has evicted.

    One server that does both is the third.
    """
    whole = serve("--page-size", "1", compressed=False)
    stem = prompt(1, 60)
    for ids in (stem, stem + prompt(2, 30), prompt(3, 300), prompt(4, 1)):
        others = whole.generate(ids, BUDGET + INTERVAL)
        ours, theirs = (cold_answer(client, ids) for client in pair)
        assert compression(ours)["rounds"] == 0
        assert ours["output_ids"] == theirs["output_ids"] == others["output_ids"]
        for field in ("output_token_logprobs", "output_top_logprobs"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    for client in pair:
        assert_pool_is_whole(client)


def test_logits(pair, tiny):
    """Prevents rounds that miss the K/V which another server computed, and wrong positions after them."""
    client, _ = pair
    stem = prompt(9, 40)
    prompts = [stem, stem + prompt(10, 12), prompt(11, 33)]
    for ids, answer in zip(prompts, client.generate_all(prompts, 260, logprobs=True), strict=True):
        assert compression(answer)["frozen_length"] == len(ids)
        assert_account(account_of(tiny), ids, answer)
    assert_pool_is_whole(client)


def test_logits_of_retracted_requests(retracting, retractions, tiny):
    """Prevents a compacted row that comes back from the host with other entries, or at other positions, in the step of
    a round as in any other."""
    prompts = [prompt(20 + number, 30 + number) for number in range(4)]
    hold_to_account(retracting, account_of(tiny), retractions, prompts)


RANKS = ("--tp-size", "2")


@pytest.mark.wide
@pytest.mark.parametrize(("page_size", "selection"), [(1, "union"), (16, "per-layer-head")])
def test_logits_on_two_ranks(serve_pairs, retractions, tiny, page_size, selection):
    """Prevents ranks that keep tokens of each other's heads, different ones of a shared set, or that disagree about who
    is admitted, retracted or due: they would then wait for one another for ever."""
    flags = ("--page-size", str(page_size), "--triattention-selection", selection, *KEYS_ALONE)
    pool = ("--max-total-tokens", "2048")
    client = serve_pairs(*RANKS, *flags, *pool, model=tiny, env={**two_cores(), **RETRACT, **retractions.env})
    prompts = [prompt(40 + number, 30 + number) for number in range(3)]
    hold_to_account(client, account_of(tiny, selection), retractions, prompts, ranks=2)
    serve_pairs.stop(client)


@pytest.mark.wide
def test_a_decode_server_measures_too(serve_pairs, chat_model, tmp_path):
    """Prevents a decode server, which needs no tokenizer for its requests, that refuses to start without a file."""
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    client = serve_pairs("--triattention-stats", "auto", model=chat_model, env=env)
    assert client.totals()["stats"].startswith(str(tmp_path / "cache"))
    assert compression(client.generate(prompt(5, 9), BUDGET + INTERVAL + 2))["rounds"] == 1
    serve_pairs.stop(client)


def test_conversations_are_refused(pair):
    """Prevents a row that no next turn can resume."""
    sampling = greedy(4, custom_params={"triattention": {"conversation": "a"}})
    decode = Client(pair[0].server)
    refused = decode.post("/generate", input_ids=prompt(4, 9), sampling_params=sampling)
    assert refused.status_code == 400
    assert "does not work on a server with --disaggregation-mode decode" in refused.text


def test_storm(retracting):
    """Prevents leaks where requests are aborted and retracted in any stage, and more of them than the pool holds.

    Every slot of the decode server is counted around each round.
    """
    storm(retracting, BUDGET + INTERVAL + 16)
