"""Two pipeline stages: each keeps a KV pool and a tree of its own, and must come to the same rounds."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import requests

from harness import (
    BUDGET,
    INTERVAL,
    KEYS_ALONE,
    STAGES,
    Client,
    assert_pool_is_whole,
    compression,
    greedy,
    install_plugin,
    prompt,
    python_path,
    served_logprobs,
    two_cores,
)
from measured_statistics import assert_ranks_measure_as_one
from oracle import TOLERANCE, Oracle, oracle_of
from storm import retractions_logged

STORM = (*STAGES, "--page-size", "16", "--triattention-selection", "shared-mean", "--chunked-prefill-size", "64")
RETRACT = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "40",
    "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "9",
}


@pytest.fixture(scope="module")
def client(serve):
    return serve("--page-size", "1", *STAGES, env=two_cores())


@pytest.fixture(scope="module")
def storm_client(serve):
    return serve(*STORM, "--max-total-tokens", "2048", env={**two_cores(), **RETRACT})


def assert_account(
    account: Oracle, ids: list[int], response: dict, frozen: int, chunk: Sequence[int] | None = None
) -> None:
    """Asserts that the served log-probabilities are those of the account, over at least five rounds."""
    everything = ids + response["output_ids"][:-1]
    expected, rounds = account.logprobs(everything, len(ids), frozen, chunk=chunk)
    assert compression(response)["rounds"] == rounds >= 5
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    dense, _ = Oracle(**{**vars(account), "budget": 10_000}).logprobs(everything, len(ids), frozen)
    assert (dense.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE


def assert_summed_once(client: Client, rounds: int) -> None:
    """Asserts that both stages compress, and that the first alone publishes the rounds so far."""
    log = client.server.log_path.read_text()
    assert all(any(f"PP{stage}" in line and "is active" in line for line in log.splitlines()) for stage in (0, 1))
    assert client.totals()["rounds"] == rounds
    metrics = requests.get(client.url + "/metrics/", timeout=60).text
    published = [line for line in metrics.splitlines() if line.startswith("sglang:triattention_rounds_total{")]
    assert [float(line.split()[-1]) for line in published] == [rounds]
    assert 'pp_rank="0"' in published[0]


@pytest.mark.wide
def test_logits_and_sums(client, tiny):
    """Prevents a stage from scoring its keys by other layers' queries, rounds that the other stage does not have, and
    rounds that both stages publish."""
    ids = prompt(9, 50)
    before = client.totals()["rounds"]
    response = client.generate(ids, 240, logprobs=True)
    assert_account(oracle_of(tiny), ids, response, len(ids))
    assert_summed_once(client, before + compression(response)["rounds"])


@pytest.mark.wide
def test_answers_below_the_trigger(serve, client):
    """Prevents compression from changing an answer, a log-probability or a prefix hit before it has evicted."""
    plain = serve("--page-size", "1", *STAGES, env=two_cores(), compressed=False)
    stem = prompt(1, 60)
    for ids in (stem, stem + prompt(3, 30)):
        ours, theirs = (each.generate(ids, BUDGET + INTERVAL, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        assert ours["output_ids"] == theirs["output_ids"]
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]


def test_conversations_are_refused(storm_client):
    """Prevents rows that one stage drops by its clock and the other keeps."""
    sampling = greedy(4, custom_params={"triattention": {"conversation": "a"}})
    refused = storm_client.post("/generate", input_ids=prompt(4, 9), sampling_params=sampling)
    assert refused.status_code == 400
    assert "does not work on a server with --pp-size 2, whose stages have no clock in common" in refused.text


def test_one_kept_set_for_each_stage(storm_client, tiny):
    """Prevents a kept set chosen by other layers than the stage's own, a compacted answer in the tree, and rounds that
    both stages publish."""
    ids, before = prompt(13, 40), storm_client.totals()["rounds"]
    account = oracle_of(tiny)
    account.selection, account.stages = "shared-mean", (1, 2)
    response = storm_client.generate(ids, 240, logprobs=True)
    assert response["meta_info"]["num_retractions"] == 0
    assert_account(account, ids, response, 32)
    assert_summed_once(storm_client, before + compression(response)["rounds"])
    following = ids + response["output_ids"]
    assert storm_client.generate(following, 1)["meta_info"]["cached_tokens"] == 32


def test_storm(storm_client):
    """Prevents stages from disagreeing, and slots from leaking, where requests are aborted, retracted and prefilled
    in chunks, and share prefixes. Every slot of both stages is counted at each round."""
    stem = prompt(70, 90)

    def ask(i: int) -> dict:
        ids = [*stem, *prompt(71 + i, 10)] if i % 2 else prompt(71 + i, 20 + i)
        return storm_client.post("/generate", rid=f"storm-{i:03}", input_ids=ids, sampling_params=greedy(260)).json()

    before, retracted = storm_client.totals()["rounds"], retractions_logged(storm_client)
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(ask, i) for i in range(8)]
        while storm_client.totals()["rounds"] < before + 8:
            time.sleep(0.05)
        for i in (0, 3):
            storm_client.post("/abort_request", rid=f"storm-{i:03}")
        answers = [future.result() for future in futures]
    whole = [answer["meta_info"] for answer in answers if answer["meta_info"]["finish_reason"]["type"] != "abort"]
    assert len(whole) == 6
    assert retractions_logged(storm_client) > retracted
    for meta in whole:
        report = meta["triattention"]
        assert meta["completion_tokens"] == 260
        assert report["physical_length"] <= report["frozen_length"] + BUDGET + INTERVAL
    assert_pool_is_whole(storm_client)


# What the first stage measures of its prefills depends on the machine. With these times, chunks shrink as a row grows.
# SGLang draws tokens that the tiny model does not have.
STEADY_TIMES = """
import numpy as np
from sglang.srt.managers.scheduler_components.dynamic_chunk_sizer import DynamicChunkSizer


def activate():
    measure, draw = DynamicChunkSizer._profile_prefill_latency, np.random.randint

    def steady(sizer):
        np.random.randint = lambda low, high, **more: draw(low, sizer.model_config.vocab_size, **more)
        try:
            lengths, times = measure(sizer)
        finally:
            np.random.randint = draw
        assert len(lengths) == len(times) > 8
        return lengths, [length + length * length / 100 for length in lengths]

    DynamicChunkSizer._profile_prefill_latency = steady
"""


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_that_a_stage_sizes(serve, tiny, tmp_path, page_size):
    """Prevents chunks of different sizes in the stages, or larger ones than rounds leave room for, and an account of
    a prompt's slots that counts what rounds have freed."""
    install_plugin(tmp_path, "steady_times", STEADY_TIMES)
    flags = ("--page-size", str(page_size), "--enable-dynamic-chunking", "--chunked-prefill-size", "256", *KEYS_ALONE)
    env = {**two_cores(), "PYTHONPATH": python_path(tmp_path)}
    client = serve(*STAGES, *flags, "--max-total-tokens", "2048", env=env)
    account = oracle_of(tiny)
    account.value_share = 0.0
    whole, before = prompt(17, 1200), len(chunk_sizes(client))
    assert_account(account, whole, client.generate(whole, 240, logprobs=True), 1200)
    sizes = chunk_sizes(client)[before:]
    assert len(set(sizes)) > 2
    assert sum(sizes) == 1200

    compact = {"triattention": {"prompt": "compact"}}
    asked = [(prompt(18, 1800), greedy(200, custom_params=compact)), (prompt(19, 1500), greedy(200))]
    answer, other = client.generate_each(asked, logprobs=True)
    assert len(other["output_ids"]) == 200
    report = compression(answer)
    assert report["rounds"] > 10
    assert report["physical_length"] <= report["frozen_length"] + BUDGET + INTERVAL
    client.flush()
    before = len(chunk_sizes(client))
    answer = client.generate(*asked[0][:1], 200, logprobs=True, custom_params=compact)
    sizes = chunk_sizes(client)[before:]
    assert_account(account, asked[0][0], answer, compression(answer)["frozen_length"], chunk=sizes)
    assert_pool_is_whole(client)
    serve.stop(client)


def chunk_sizes(client: Client) -> list[int]:
    """Tokens of each prefill of the first stage so far."""
    found = re.findall(r"PP0\] Prefill batch.*#new-token: (\d+)", client.server.log_path.read_text())
    return [int(tokens) for tokens in found]


@pytest.mark.wide
def test_statistics_measured_over_stages(serve, chat_model, tmp_path):
    """Prevents a launch whose stages measure each their own model, or wait for each other."""
    start = partial(serve, model=chat_model, tokenizer=True)
    assert_ranks_measure_as_one(start, serve.stop, STAGES, BUDGET, tmp_path)
