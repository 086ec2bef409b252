"""Retraction, abort, finish, chunked prefill, flush, several samples: nothing leaks and every answer is whole."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from harness import assert_pool_is_whole, compression, prompt

CHUNKED = ("--chunked-prefill-size", "64", "--max-total-tokens", "2048")


def test_chunked_prefill(serve):
    """Prevents a round from touching a prompt that is still being computed."""
    client = serve("--page-size", "1", *CHUNKED)
    reference = serve("--page-size", "1").generate(prompt(1, 500), 200)
    chunked = client.generate(prompt(1, 500), 200)
    assert chunked["output_ids"] == reference["output_ids"]
    assert compression(chunked) == compression(reference)
    client.generate_all([prompt(60 + i, 300) for i in range(6)], 110)
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_several_samples_of_one_prompt(serve):
    """Prevents samples of the same prompt (`n`) from evicting one another's tokens."""
    client = serve("--page-size", "1")
    ids = prompt(2, 30)
    alone = client.generate(ids, 200)["output_ids"]
    response = client.post(
        "/generate",
        input_ids=ids,
        sampling_params={"max_new_tokens": 200, "temperature": 0, "ignore_eos": True, "n": 3},
    )
    samples = response.json()
    assert [sample["output_ids"] for sample in samples] == [alone] * 3
    assert all(compression(sample)["rounds"] == 4 for sample in samples)
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_streaming(serve):
    """Prevents a stream from losing tokens at a round, or reporting anywhere but at its end."""
    client = serve("--page-size", "1")
    ids = prompt(3, 30)
    whole = client.generate(ids, 200)
    sampling = {"max_new_tokens": 200, "temperature": 0, "ignore_eos": True}
    with requests.post(
        client.url + "/generate",
        json={"input_ids": ids, "sampling_params": sampling, "stream": True},
        stream=True,
        timeout=600,
    ) as response:
        lines = [line.removeprefix(b"data: ") for line in response.iter_lines() if line.startswith(b"data: {")]
    chunks = [json.loads(line) for line in lines]
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert compression(chunks[-1]) == compression(whole)
    assert all("triattention" not in chunk["meta_info"] for chunk in chunks[:-1])


def test_without_the_radix_cache(serve):
    """Prevents the prompt from being evicted if no tree protects it."""
    client = serve("--page-size", "1", "--disable-radix-cache")
    ids = prompt(4, 70)
    response = client.generate(ids, 200)
    report = compression(response)
    assert report["frozen_length"] == 70
    assert report["rounds"] >= 4
    assert report["physical_length"] <= 70 + 64 + 32
    assert response["output_ids"] == serve("--page-size", "1").generate(ids, 200)["output_ids"]
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_abort_in_the_middle(serve):
    """Prevents the slots of an aborted, compacted request from being lost or freed twice."""
    client = serve("--page-size", "16")
    before = client.totals()["rounds"]
    with ThreadPoolExecutor(8) as pool:
        futures = [
            pool.submit(
                client.post,
                "/generate",
                rid=f"abort-{i}",
                input_ids=prompt(70 + i, 20 + i),
                sampling_params={"max_new_tokens": 2000, "temperature": 0, "ignore_eos": True},
            )
            for i in range(8)
        ]
        while client.totals()["rounds"] < before + 16:
            time.sleep(0.2)
        for i in range(8):
            client.post("/abort_request", rid=f"abort-{i}")
        results = [future.result().json() for future in futures]
    reports = [result["meta_info"].get("triattention", {}) for result in results]
    assert all(result["meta_info"]["finish_reason"]["type"] == "abort" for result in results)
    assert sum(report.get("rounds", 0) for report in reports) >= 16
    assert_pool_is_whole(client)


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 16])
def test_retraction(serve, page_size):
    """Prevents a retracted request from resuming with the lengths or counts of the row that it lost.

    SGLang's own test switch retracts a request every few steps. Although the output is prefilled again, the answer must
    be one that a request without retraction could give: as long, and within the same bound.
    """
    client = serve(
        "--page-size",
        str(page_size),
        env={
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "40",
            "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "9",
        },
    )
    responses = client.generate_all([prompt(80 + i, 25) for i in range(4)], 300)
    assert sum(response["meta_info"]["num_retractions"] for response in responses) > 4
    for response in responses:
        report = compression(response)
        assert response["meta_info"]["completion_tokens"] == 300
        assert report["logical_length"] == 25 + 299
        assert report["logical_length"] - report["physical_length"] == report["evicted_tokens"]
        # The recomputed output is private again, so even a retracted request ends within its bound.
        assert report["frozen_length"] <= 25
        assert report["physical_length"] <= report["frozen_length"] + 64 + 32
    assert_pool_is_whole(client)


@pytest.mark.parametrize("page_size", [1, 64])
def test_storm(serve, page_size):
    """Prevents any slot from being lost in a random mix of lengths, shared prefixes, aborts and flushes."""
    client = serve("--page-size", str(page_size), *CHUNKED)
    rng = random.Random(page_size)
    stems = [prompt(100 + i, 90) for i in range(3)]

    def one(number: int) -> dict:
        stem = rng.choice(stems)[: rng.randrange(90)]
        ids = stem + prompt(200 + number, rng.randrange(1, 60))
        tokens = rng.choice([1, 7, 60, 150, 260])
        rid = f"storm-{page_size}-{number:03}"
        if rng.random() < 0.25:
            threading.Timer(rng.uniform(0.2, 4), lambda: client.post("/abort_request", rid=rid)).start()
        response = client.post(
            "/generate",
            rid=rid,
            input_ids=ids,
            sampling_params={"max_new_tokens": tokens, "temperature": 0.8, "ignore_eos": True},
        )
        return {"asked": tokens, **response.json()}

    with ThreadPoolExecutor(12) as pool:
        results = list(pool.map(one, range(24)))
    finished = [result for result in results if result["meta_info"]["finish_reason"]["type"] == "length"]
    assert len(finished) > 12
    assert all(result["meta_info"]["completion_tokens"] == result["asked"] for result in finished)
    assert client.totals()["rounds"] > 8
    assert_pool_is_whole(client)
