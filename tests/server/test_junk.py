"""Bad requests and clients that go away, against a live server."""

from __future__ import annotations

import time

import requests
from hypothesis import HealthCheck, given, settings

from harness import assert_pool_is_whole, compression, greedy, prompt
from junk_params import CUSTOM_PARAMS, as_json

CASES = 400
ENDPOINTS = ("/generate", "/v1/completions", "/v1/chat/completions")


def test_settings_that_are_junk(chat_client):
    """Prevents a client from getting status 500, or from ending the server, with what it puts into custom_params."""
    codes = []

    def body(endpoint: str, params: object) -> dict:
        if endpoint == "/generate":
            return {"text": "one two", "sampling_params": greedy(1, custom_params=params)}
        asked = {"model": "m", "max_tokens": 1, "custom_params": params}
        if endpoint == "/v1/completions":
            return {**asked, "prompt": "one two"}
        return {**asked, "messages": [{"role": "user", "content": "one two"}]}

    @settings(
        max_examples=CASES, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )
    @given(CUSTOM_PARAMS)
    def run(params):
        if not as_json(params):
            return
        endpoint = ENDPOINTS[len(codes) % len(ENDPOINTS)]
        response = chat_client.post(endpoint, **body(endpoint, params))
        assert response.status_code in (200, 400), f"{endpoint} {response.status_code}: {response.text[:2000]}"
        # Of what is not an object at all, SGLang's own answer quotes everything.
        assert not isinstance(params, dict) or len(response.text) < 5000
        codes.append(response.status_code)

    run()
    assert 30 < codes.count(400) < len(codes) - 30
    batch = [greedy(1, custom_params={"triattention": asked}) for asked in ({}, {"budget": "much"})]
    refused = chat_client.post("/generate", text=["one", "two"], sampling_params=batch)
    assert refused.status_code == 400
    assert_pool_is_whole(chat_client)


def test_a_client_that_goes_away(serve):
    """Prevents an abandoned stream from keeping its slots, or its conversation a row that no client knows."""
    client = serve("--page-size", "1")
    ids = prompt(33, 30)
    asked = {"triattention": {"conversation": "gone"}}
    sampling = greedy(2000, custom_params=asked)
    before = client.totals()["rounds"]
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    with requests.post(client.url + "/generate", json=body, stream=True, timeout=600) as response:
        lines = response.iter_lines()
        next(lines)
        while client.totals()["rounds"] < before + 2:
            time.sleep(0.1)
    deadline = time.monotonic() + 60
    while client.slots_in_use():
        assert time.monotonic() < deadline, "the slots of a client that has gone are still in use"
        time.sleep(0.1)
    turn = client.post("/generate", input_ids=[*ids, 7], sampling_params=greedy(2, custom_params=asked)).json()
    assert compression(turn)["conversation"] == "new"
    assert_pool_is_whole(client)
