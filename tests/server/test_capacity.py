"""What the scheduler does with bounded requests, and what no request can make it do."""

from __future__ import annotations

import re

import pytest
import requests

from harness import BUDGET, INTERVAL, assert_pool_is_whole, compression, greedy, prompt
from sets import wide
from storm import FLAGS, RETRACTING, retractions, storm

DENSE = {"triattention": {"enabled": False}}
COMPACT = {"triattention": {"prompt": "compact"}}
# SGLang's estimate of what answers will need, at its most optimistic.
BOLD = ["--schedule-conservativeness", "0.1"]


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_admitted_requests_fit_at_their_bound(probed, page_size):
    """Prevents an over-committed pool, which retracts, and reservations made as if nothing were ever evicted."""
    client, steps = probed("--page-size", str(page_size), "--max-total-tokens", "1024", *BOLD)
    steps()
    length = 32
    bound = length + BUDGET + INTERVAL
    responses = client.generate_all([prompt(90 + i, length) for i in range(10)], 250)
    assert all(response["meta_info"]["completion_tokens"] == 250 for response in responses)
    assert retractions(responses) == 0
    assert client.totals()["pressure_rounds"] == 0
    running = max(len(step["requests"]) for step in steps())
    # Dense, each would have reserved 282 tokens: three at once. A request near its end reserves less than its bound.
    assert 1024 // bound <= running <= 1024 // bound + 1
    assert_pool_is_whole(client)


def test_an_answer_ends_where_its_share_fills_the_pool(serve):
    """Prevents a budget that grows past the pool, which retracts without end, and a share that a request declined."""
    client = serve("--page-size", "16", "--max-total-tokens", "208", "--triattention-keep-share", "0.5")
    ids, room = prompt(64, 32), 208 - 16 - 32
    response = client.generate(ids, 1500)
    tokens, report = response["meta_info"]["completion_tokens"], compression(response)
    assert response["meta_info"]["finish_reason"]["type"] == "length"
    assert retractions([response]) == 0
    assert 2 * (room - INTERVAL) - 3 < tokens < 2 * (room - INTERVAL) + 3
    assert 32 + (tokens - 1) / 2 <= report["physical_length"] <= 32 + tokens / 2 + INTERVAL
    # One at a time: both would not fit at their bounds.
    both = client.generate_all([prompt(65, 32), prompt(66, 32)], 150)
    assert [each["meta_info"]["completion_tokens"] for each in both] == [150, 150]
    assert retractions(both) == client.totals()["pressure_rounds"] == 0
    declined = client.generate(ids, 400, custom_params={"triattention": {"keep_share": 0}})
    assert declined["meta_info"]["completion_tokens"] == 400
    assert compression(declined)["physical_length"] <= 32 + BUDGET + INTERVAL
    assert_pool_is_whole(client)


def test_a_request_that_can_never_fit_is_refused(serve):
    """Prevents a request whose bound exceeds the pool from waiting forever or ending the scheduler."""
    client = serve("--max-total-tokens", "256")
    # Its bound does not fit after this prompt, so it gets as many tokens as the pool holds, as in plain SGLang.
    response = client.generate(prompt(60, 200), 400)
    assert response["meta_info"]["finish_reason"]["type"] == "length"
    assert 40 < response["meta_info"]["completion_tokens"] < 56
    # Nor does a prompt with log-probabilities requested, which no round may shorten even if it may be compacted.
    params = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": COMPACT}
    asked = client.post(
        "/generate", input_ids=prompt(60, 200), sampling_params=params, return_logprob=True, logprob_start_len=0
    )
    assert 40 < asked.json()["meta_info"]["completion_tokens"] < 56
    assert len(asked.json()["meta_info"]["input_token_logprobs"]) == 200
    # Matching all of it would freeze nearly the whole pool.
    again = client.generate(prompt(60, 200) + prompt(61, 30), 120, custom_params=COMPACT)
    assert again["meta_info"]["completion_tokens"] == 120
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_wrong_fields_are_refused(serve):
    """Prevents a mistyped field from being ignored, and one client's mistake from reaching the others."""
    client = serve()
    for asked, words in (
        ({"budget": BUDGET + 1}, f"from 1 to {BUDGET}"),
        ({"bugdet": 3}, "triattention.bugdet"),
        ({"prompt": "gone"}, "frozen or compact"),
        ("compact", "must be an object"),
    ):
        params = {"max_new_tokens": 4, "custom_params": {"triattention": asked}}
        response = client.post("/generate", input_ids=prompt(1, 9), sampling_params=params)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert words in message
        assert "\n" not in message.strip()
    assert compression(client.generate(prompt(1, 9), 200, custom_params={"triattention": {"budget": 40}}))["rounds"] > 3


def series(client) -> set[str]:
    """Names and labels of all figures in /metrics."""
    lines = requests.get(client.url + "/metrics", timeout=60).text.splitlines()
    return {line.rpartition(" ")[0] for line in lines if "triattention" in line and not line.startswith("#")}


def test_what_a_client_sends_stays_small(serve):
    """Prevents a client's words from filling answers, logs or the time series of Prometheus, or ending the server."""
    client = serve()
    logged = len(client.server.log_path.read_text())

    def take_turns(name: str) -> None:
        """Five conversations of one turn."""
        for number in range(5):
            named = {"triattention": {"conversation": f"{name} {number}", "release": True}}
            client.generate(prompt(1, 9), 100, custom_params=named)

    take_turns("first")
    before = series(client)
    long, lines = "x" * 50_000, "\nINFO forged\n"
    for custom_params, more in (
        ({"triattention": {long + lines: 1}}, {}),
        ({"triattention": {"budget": [long, lines]}}, {}),
        ({"triattention": {"conversation": long}}, {}),
        ({"triattention": {"prompt": {long: lines}}}, {}),
        ({"triattention": long}, {}),
        (long, {}),
        ([lines], {}),
        ({"triattention": {"conversation": "c"}}, {"beam_width": long}),
    ):
        params = {"max_new_tokens": 4, "custom_params": custom_params, **more}
        response = client.post("/generate", input_ids=prompt(1, 9), sampling_params=params)
        assert response.status_code == 400, response.text[:300]
        if not more:
            message = response.json()["error"]["message"]
            assert len(message) <= 600
            assert message.isprintable()
    take_turns("secret")
    assert series(client) == before
    log = client.server.log_path.read_text()[logged:]
    assert not re.search("forged|secret|x{200}", log)
    client.assert_alive()


def test_conversations_of_other_tenants_are_not_resumed(serve):
    """Prevents a request with another extra key or salt, as gateways set for each tenant, from reading a row."""
    client = serve()
    ids = prompt(80, 20)
    named = greedy(150, custom_params={"triattention": {"conversation": "ours"}})
    first = client.post("/generate", input_ids=ids, sampling_params=named, extra_key="tenant 1").json()
    assert compression(first)["conversation_kept"]
    following = ids + first["output_ids"] + prompt(81, 5)
    for stranger in ({"extra_key": "tenant 2"}, {"cache_salt": "tenant 2"}, {}):
        answer = client.post("/generate", input_ids=following, sampling_params=named, **stranger).json()
        assert compression(answer)["conversation"] in ("diverged", "lost")
        assert answer["meta_info"]["cached_tokens"] == 0
        client.flush()
        first = client.post("/generate", input_ids=ids, sampling_params=named, extra_key="tenant 1").json()
    again = client.post("/generate", input_ids=following, sampling_params=named, extra_key="tenant 1").json()
    assert compression(again)["conversation"] == "resumed"
    client.flush()


@pytest.mark.parametrize(("page_size", "requests"), [wide(1, 100), wide(16, 100), (16, 40)])
def test_storm_under_pressure(serve, page_size, requests):
    """Prevents leaks, hangs and truncated answers in a random mix of everything that competes for a small pool."""
    client = serve("--page-size", str(page_size), "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, page_size, requests, (8, BUDGET), 1500)
    assert len(finished) > 0.6 * requests
    assert retractions(finished) > requests / 20
    assert client.totals()["rounds"] > requests / 2
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_enabled_false_is_plain_sglang(serve):
    """Prevents a request that declines compression from being compressed anyway."""
    response = serve().generate(prompt(70, 30), 200, custom_params=DENSE)
    report = compression(response)
    assert (report["rounds"], report["evicted_tokens"]) == (0, 0)
    assert report["physical_length"] == report["logical_length"] == 30 + 199
