"""Several processes that answer HTTP requests (--tokenizer-worker-num), none of which loads SGLang plugins."""

from __future__ import annotations

import http.client
import json
import time

import psutil
import pytest

from harness import BUDGET, assert_pool_is_whole, compression, greedy, prompt
from storm import FLAGS, RETRACTING, assert_withstood, storm

WORKERS = ("--tokenizer-worker-num", "2", "--enable-http-worker-reuseport")


def connections(client) -> list[http.client.HTTPConnection]:
    """A connection to each of the server's two workers, both of which have sent their first request."""
    server = psutil.Process(client.server.process.pid)
    found = {}
    deadline = time.monotonic() + 120
    # The kernel chooses the worker of a connection.
    while len(found) < 2:
        assert time.monotonic() < deadline, f"connections reached only {found}"
        connection = http.client.HTTPConnection("127.0.0.1", client.server.port, timeout=120)
        connection.connect()
        status, _ = ask(connection, "GET", "/health")
        if status != 200:
            time.sleep(0.1)
            continue
        port = connection.sock.getsockname()[1]
        for process in server.children(recursive=True):
            if any(peer.raddr and peer.raddr.port == port for peer in process.net_connections("tcp")):
                found.setdefault(process.pid, connection)
    return list(found.values())


def ask(
    connection: http.client.HTTPConnection, method: str, path: str, headers: dict | None = None, **body
) -> tuple[int, str]:
    connection.request(method, path, json.dumps(body), {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    return response.status, response.read().decode()


def test_each_worker_refuses_and_reports(serve):
    """Prevents requests that one of the workers lets pass unchecked, and answers of one that lack the report."""
    client = serve(*WORKERS)
    client.flush()
    for number, connection in enumerate(connections(client)):
        sampling = greedy(200, custom_params={"triattention": {"budget": 48}})
        status, text = ask(connection, "POST", "/generate", input_ids=prompt(number, 30), sampling_params=sampling)
        assert status == 200, text
        report = json.loads(text)["meta_info"]["triattention"]
        assert report["rounds"] >= 4
        assert report["physical_length"] <= 30 + 48 + 32
        for stream in (False, True):
            sampling["custom_params"] = {"triattention": {"budget": 100_000}}
            body = {"input_ids": [1, 2], "sampling_params": sampling, "stream": stream}
            status, text = ask(connection, "POST", "/generate", **body)
            assert status == 400
            assert "custom_params.triattention.budget" in text
        status, text = ask(connection, "POST", "/api/chat", {"X-TriAttention": "on"}, model="m", messages=[])
        assert (status, "X-TriAttention" in text) == (400, True)
        body = {"input_ids": prompt(number, 30), "sampling_params": greedy(120)}
        status, text = ask(connection, "POST", "/generate", {"X-TriAttention": "off"}, **body)
        assert (status, json.loads(text)["meta_info"]["triattention"]["rounds"]) == (200, 0)
    # Two workers answered, one scheduler held all of it.
    assert client.totals()["rounds"] >= 8
    assert_pool_is_whole(client)


SMALL_POOL = (*WORKERS, "--page-size", "16", "--max-total-tokens", "1024", *FLAGS)


@pytest.mark.wide
def test_answers_below_the_trigger(serve):
    """Prevents answers below the trigger from differing from plain SGLang's."""
    client, plain = (serve(*SMALL_POOL, env=RETRACTING, compressed=compressed) for compressed in (True, False))
    # SGLang takes requests once one worker is ready; the other's first request would share a batch with these.
    for each in (client, plain):
        connections(each)
    for ids in (prompt(1, 60), prompt(1, 60) + prompt(3, 30)):
        ours, theirs = (each.generate(ids, BUDGET, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    serve.stop(plain)


@pytest.mark.wide
def test_storm(serve):
    """Prevents leaks where the workers abort requests that the scheduler retracts."""
    client = serve(*SMALL_POOL, env=RETRACTING)
    _, finished = storm(client, 5, 40, (24, BUDGET), 1500, conversations=4)
    assert_withstood(client, finished, 40)
