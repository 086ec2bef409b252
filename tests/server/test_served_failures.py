"""A live server in which every step of a compaction round raises once, and then one of them always."""

from __future__ import annotations

from pathlib import Path

import pytest
import requests

import faulty_rounds
from harness import assert_pool_is_whole, compression, greedy, install_plugin, prompt, python_path, served_logprobs
from sets import wide

TOKENS = 150
READING = ("plan", "early rounds", "snapshot", "lengths", "score", "select")
"""Steps before anything has changed: the requests go on."""
TALKING = ("resume", "park")
CHANGING = tuple(step for step in faulty_rounds.STEPS if step not in (*READING, *TALKING))


@pytest.fixture(scope="module")
def faults(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("faulty")
    install_plugin(folder, "faulty", Path(faulty_rounds.__file__).read_text())
    file = folder / "fault"
    file.write_text("")
    return file


def faulty_client(serve, faults, *flags: str):
    env = {"PYTHONPATH": python_path(faults.parent), "FAULT_FILE": str(faults)}
    return serve("--page-size", "1", *flags, env=env)


@pytest.fixture
def client(serve, faults):
    return faulty_client(serve, faults)


def ask(client, seed: int, **fields) -> requests.Response:
    params = greedy(TOKENS, custom_params={"triattention": fields} if fields else None)
    return client.post("/generate", input_ids=prompt(seed, 30), sampling_params=params, return_logprob=False)


def assert_error(response: requests.Response) -> None:
    assert response.status_code == 500, response.text
    assert "Compression of this request failed on the server" in response.text


@pytest.mark.parametrize("step", [READING[0], *map(wide, READING[1:]), CHANGING[0], *map(wide, CHANGING[1:])])
def test_a_step_that_raises_once(client, faults, step):
    """Prevents one failure from ending the server, losing slots, or changing what later requests get."""
    client.flush()
    before = client.generate(prompt(7, 40), TOKENS, logprobs=True)
    failed = client.totals()["failed_rounds"]
    faults.write_text(step)
    response = ask(client, 5)
    assert faults.read_text() == "", f"{step} was never reached"
    if step in READING:
        assert response.status_code == 200, response.text
        assert compression(response.json())["rounds"] > 0
    else:
        assert_error(response)
    assert client.totals()["failed_rounds"] == failed + 1
    # With the same tree as before, the log-probabilities are the same to the last bit.
    client.flush()
    after = client.generate(prompt(7, 40), TOKENS, logprobs=True)
    assert after["output_ids"] == before["output_ids"]
    assert (served_logprobs(after)[0] == served_logprobs(before)[0]).all()
    assert compression(after) == compression(before)
    assert client.totals()["stopped"] is None
    assert_pool_is_whole(client)


@pytest.mark.parametrize("step", ["park", wide("resume")])
def test_a_conversation_whose_row_fails(client, faults, step):
    """Prevents a turn from failing with the row that it would resume or leave, and that row from being lost."""
    first = ask(client, 6, conversation=step).json()
    assert compression(first)["conversation_kept"]
    history = prompt(6, 30) + first["output_ids"]
    faults.write_text(step)
    params = greedy(TOKENS, custom_params={"triattention": {"conversation": step}})
    turn = client.post("/generate", input_ids=[*history, 9], sampling_params=params)
    assert faults.read_text() == ""
    assert turn.status_code == 200, turn.text
    report = compression(turn.json())
    assert report["conversation"] == {"resume": "diverged", "park": "resumed"}[step]
    assert report["conversation_kept"]
    if step == "park":
        # The copy of the row from before the turn is still there.
        again = client.post("/generate", input_ids=[*history, 9], sampling_params=params)
        assert compression(again.json())["conversation"] == "resumed"
        assert again.json()["output_ids"] == turn.json()["output_ids"]
    assert_pool_is_whole(client)


@pytest.mark.parametrize("flags", [(), wide(("--fastapi-root-path", "/x"))], ids=["", "root path"])
def test_rounds_that_always_fail_stop_compression(serve, faults, flags):
    """Prevents a server that compresses nothing any more from looking healthy, or from failing new requests; also for a
    proxy that has it under a path of its own, and strips that."""
    faults.write_text("")
    client = faulty_client(serve, faults, *flags)
    plain = ask(client, 8, enabled=False).json()["output_ids"]
    assert requests.get(client.url + "/health_generate", timeout=60).status_code == 200
    faults.write_text("score always")
    assert_error(ask(client, 8))
    # Rounds would still fail, but there are none.
    answer = ask(client, 8, conversation="late")
    assert answer.status_code == 200, answer.text
    assert answer.json()["output_ids"] == plain
    report = compression(answer.json())
    assert (report["rounds"], report["conversation"], report["conversation_kept"]) == (0, "new", False)
    reason = client.totals()["stopped"]
    assert reason.startswith("Compression has stopped, because its rounds failed 3 times in a row (RuntimeError: pl")
    for path in ("/health_generate", "/ready"):
        check = requests.get(client.url + path, timeout=60)
        assert (check.status_code, check.json()["error"]["message"]) == (503, reason), path
    assert requests.get(client.url + "/health", timeout=60).status_code == 200
    metrics = requests.get(client.url + "/metrics", timeout=60).text
    values = [line for line in metrics.splitlines() if line.startswith("sglang:triattention_stopped{")]
    assert [value.rpartition(" ")[2] for value in values] == ["1.0"]
    assert "sglang:triattention_failed_rounds_total{" in metrics
    log = client.server.log_path.read_text()
    assert log.count("Traceback") == 1
    assert log.count(f"TriAttention: {reason}") == 1
    assert ask(client, 9, budget="many").status_code == 400
    assert_pool_is_whole(client)
