"""What a server publishes about its rounds, and the ways to look at it."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest
import requests

from harness import assert_pool_is_whole, compression, greedy, prompt
from sglang_triattn.patches.observability.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, REFUSED
from sglang_triattn.request.options import REASONS
from storm import WITHOUT_END

SMALL_POOL = ("--max-total-tokens", "1024", "--schedule-conservativeness", "0.1")


@pytest.fixture
def client(serve):
    """The Client of a server whose pool is small enough for early rounds."""
    return serve("--page-size", "1", *SMALL_POOL, "--triattention-pressure-budget", "32")


def samples(client) -> dict[str, float]:
    """The samples of `/metrics` that are this package's, summed over all labels but `le` and `reason`."""
    found = defaultdict(float)
    for line in requests.get(client.url + "/metrics", timeout=60).text.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith(PREFIX):
            label = re.search(r'(?:le|reason)="([^"]*)"', name)
            found[name.partition("{")[0].removeprefix(PREFIX) + (f":{label[1]}" if label else "")] += float(value)
    return found


def crowd(client) -> None:
    """Requests that outgrow the pool together, those that decline compression included."""
    compressed = [(prompt(40 + i, 20), greedy(300)) for i in range(4)]
    declined = greedy(250, custom_params={"triattention": {"enabled": False}}, **WITHOUT_END)
    client.generate_each([*compressed, *[(prompt(50 + i, 20), declined) for i in range(4)]])


def two_turns(client, name: str) -> None:
    named = {"triattention": {"conversation": name}}
    ids = prompt(60, 20)
    first = client.generate(ids, 150, custom_params=named)
    second = client.generate(ids + first["output_ids"] + prompt(61, 8), 60, custom_params=named)
    assert compression(second)["conversation"] == "resumed"


def refused(client, **fields) -> None:
    params = {"max_new_tokens": 4, "custom_params": {"triattention": fields}}
    assert client.post("/generate", input_ids=prompt(1, 9), sampling_params=params).status_code == 400


def test_sums_are_those_of_the_server(client):
    """Prevents metrics that say something else than what happened."""
    crowd(client)
    two_turns(client, "metrics")
    before = samples(client)
    for fields in ({"bugdet": 3}, {"budget": 0}, {"release": True}):
        refused(client, **fields)
    client.flush()
    after, totals = samples(client), client.totals()
    assert totals["pressure_rounds"] > 0
    assert totals["moved_bytes"] > 0
    for name in COUNTERS:
        assert after[name] == totals[name.removesuffix("_total")], name
    told = {reason: after[f"{REFUSED}:{reason}"] - before[f"{REFUSED}:{reason}"] for reason in REASONS}
    assert told == {"unknown_field": 1, "wrong_value": 1, "conflict": 1, "media": 0}
    for name in HISTOGRAMS:
        assert 0 < after[f"{name}_count"] <= totals["rounds"]
    assert after["round_requests_sum"] == totals["rounds"]
    assert after["round_host_seconds_count"] == after["round_device_seconds_count"] == after["round_requests_count"]
    assert after["round_device_seconds_sum"] > 0
    assert set(GAUGES) <= set(after)
    assert_pool_is_whole(client)
