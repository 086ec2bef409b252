"""What a server publishes about its rounds, and the ways to look at it."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
import requests

import prometheus
from harness import BUDGET, INTERVAL, assert_pool_is_whole, compression, greedy, prompt
from sglang_triattn.cli import main as cli
from sglang_triattn.patches.observability.metrics import COUNTERS, GAUGES, HISTOGRAMS, PREFIX, REFUSED
from sglang_triattn.request.options import REASONS
from storm import WITHOUT_END

# Nothing stops compression here; gauges of the queue are set between requests.
MAY_BE_ZERO = {"failed", "Compression", "waiting", "in the tree, evictable"}
STEP_S = 0.5
TERMINAL = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
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
    """Requests that outgrow the pool together, and are all answered to their ends.

    Those that decline compression are admitted on SGLang's optimistic estimate, and take no part in early rounds.
    """
    compressed = [(prompt(40 + i, 20), greedy(300)) for i in range(4)]
    declined = greedy(250, custom_params={"triattention": {"enabled": False}}, **WITHOUT_END)
    responses = client.generate_each([*compressed, *[(prompt(50 + i, 20), declined) for i in range(4)]])
    assert [response["meta_info"]["completion_tokens"] for response in responses] == [300] * 4 + [250] * 4
    assert all(compression(response)["rounds"] == 0 for response in responses[4:])
    assert client.totals()["pressure_rounds"] > 0


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
    """Prevents metrics that say something else than what happened, and a full pool from retracting requests while
    others hold tokens above the floor."""
    crowd(client)
    two_turns(client, "metrics")
    before = samples(client)
    for fields in ({"bugdet": 3}, {"budget": 0}, {"release": True}):
        refused(client, **fields)
    client.flush()
    after, totals = samples(client), client.totals()
    assert totals["moved_bytes"] > 0
    for name in COUNTERS:
        assert after[name] == totals[name.removesuffix("_total")], name
    counted = {reason: after[f"{REFUSED}:{reason}"] - before[f"{REFUSED}:{reason}"] for reason in REASONS}
    assert counted == {"unknown_field": 1, "wrong_value": 1, "conflict": 1, "media": 0}
    for name in HISTOGRAMS:
        assert 0 < after[f"{name}_count"] <= totals["rounds"]
    assert after["round_requests_sum"] == totals["rounds"]
    assert after["round_host_seconds_count"] == after["round_device_seconds_count"] == after["round_requests_count"]
    assert after["round_device_seconds_sum"] > 0
    assert set(GAUGES) <= set(after)
    assert_pool_is_whole(client)


def test_every_metric_of_the_dashboard_is_published(client):
    """Prevents a panel that stays empty because the server has no such metric, SGLang's own included."""
    if not client.totals()["pressure_rounds"]:
        crowd(client)
    published = {line.partition("{")[0] for line in requests.get(client.url + "/metrics", timeout=60).text.splitlines()}
    asked = {
        name
        for panel in prometheus.panels()
        for target in panel["targets"]
        for name in re.findall(r"sglang:\w+", target["expr"])
    }
    assert len(asked) > 20
    assert asked <= published


@pytest.mark.skipif(not prometheus.can_prepare(), reason="neither Prometheus nor Debian's packages are here")
def test_every_panel_of_the_dashboard_has_data(client, tmp_path):
    """Prevents panels that stay empty, and queries that Prometheus refuses."""
    target = client.url.removeprefix("http://")
    with prometheus.running_prometheus([target], "2s", tmp_path / "prometheus.log") as scraper:
        start = time.time()
        # Rates need a look before, and one after.
        wait_until(lambda: scraper.query('up{job="sglang"} == 1'))
        refused(client, budget=0)
        crowd(client)
        two_turns(client, "dashboard")
        rounds = client.totals()["rounds"]
        wait_until(lambda: scraper.query(f"{PREFIX}rounds_total == {rounds} and {PREFIX}conversations_parked > 0"))
        # One step later: the last one before now may lie before the scrape that was waited for.
        end = time.time() + STEP_S
        for panel in prometheus.panels():
            for asked in panel["targets"]:
                series = scraper.query_range(prometheus.filled(asked["expr"], "10s"), start, end, STEP_S)
                values = [float(value) for one in series for _, value in one["values"]]
                assert any(map(math.isfinite, values)), (panel["title"], asked["expr"])
                if panel["title"] not in MAY_BE_ZERO and asked["legendFormat"] not in MAY_BE_ZERO:
                    assert any(value > 0 for value in values), (panel["title"], asked["expr"])


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_top_shows_running_requests(client, capsys):
    """Prevents a view that disagrees with the server about what requests hold."""
    declines = {"triattention": {"enabled": False}}
    asked = [(prompt(70, 20), greedy(900)), (prompt(71, 20), greedy(400, custom_params=declines))]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate_each, asked)
        wait_until(lambda: client.totals()["running_requests"] == 2 and client.totals()["requests"][0]["rounds"])
        options = ["top", "--url", client.url, "--interval", "0.2", "--once"]
        assert cli.main([*options, "--json"]) == 0
        (replica,) = json.loads(capsys.readouterr().out)["replicas"]
        assert cli.main(options) == 0
        drawn = capsys.readouterr().out
        assert not running.done()
        # Their ends are of no interest.
        client.post("/abort_request", abort_all=True)
        running.result()
    assert replica["running_requests"] == 2
    by_rounds = sorted(replica["requests"], key=lambda request: request["rounds"])
    assert [request["frozen"] for request in by_rounds] == [None, 20]
    assert by_rounds[0]["physical"] == by_rounds[0]["logical"]
    assert by_rounds[1]["physical"] <= 20 + BUDGET + INTERVAL < by_rounds[1]["logical"]
    assert all(request["tokens_per_second"] > 0 for request in replica["requests"])
    assert replica["physical_tokens"] == sum(request["physical"] for request in replica["requests"])
    assert replica["pool"]["slots"] == 1024
    assert "running 2, waiting 0" in drawn
    assert_pool_is_whole(client)


def test_top_ends_without_a_trace(client):
    """Prevents a terminal that Ctrl-C leaves on another screen, and a traceback in it."""
    leader, follower = pty.openpty()
    command = [sys.executable, "-P", "-c", "import sys; from sglang_triattn.cli.main import main; sys.exit(main())"]
    command += ["top", "--url", client.url, "--interval", "0.1"]
    process = subprocess.Popen(
        command,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=TERMINAL,
        # A shell starts background jobs with this signal ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(follower)
    output = b""
    while b"running 0" not in output:
        output += os.read(leader, 4096)
    process.send_signal(signal.SIGINT)
    with suppress(OSError):
        while part := os.read(leader, 4096):
            output += part
    assert process.wait() == 0
    # The other screen and the hidden cursor, each entered and left.
    assert output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l") == 1
    assert output.count(b"\x1b[?25l") == output.count(b"\x1b[?25h")
    assert b"Traceback" not in output
