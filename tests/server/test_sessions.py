"""SGLang's own sessions, and pauses of the whole server, with compressed requests."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from harness import BUDGET, INTERVAL, Client, assert_pool_is_whole, compression, prompt

SAMPLING = {"temperature": 0, "ignore_eos": True}


def say(client: Client, session: dict, ids: list[int], tokens: int = 120, **sampling) -> dict:
    """One turn of a session; `session` says which request it follows."""
    sampling = {**SAMPLING, "max_new_tokens": tokens, **sampling}
    response = client.post("/generate", input_ids=ids, session_params=session, sampling_params=sampling)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.fixture
def session(serve):
    """A Client, and the id of a session that is open on its server."""
    client = serve("--page-size", "1")
    name = client.post("/open_session", capacity_of_str_len=10_000).json()
    yield client, name
    assert client.post("/close_session", session_id=name).status_code == 200
    assert_pool_is_whole(client)


def test_session_equals_plain_requests(session):
    """Prevents a session from resuming after a compressed row, or after other tokens than were generated."""
    client, name = session
    first = say(client, {"id": name}, prompt(1, 40))
    assert compression(first)["rounds"] == 1
    parent = {"id": name, "rid": first["meta_info"]["id"]}
    # Two branches of the same turn.
    for seed in (2, 3):
        turn = say(client, parent, prompt(seed, 12))
        whole = prompt(1, 40) + first["output_ids"] + prompt(seed, 12)
        assert turn["meta_info"]["prompt_tokens"] == len(whole)
        report = compression(turn)
        assert report["frozen_length"] == len(whole)
        client.flush()
        plain = client.generate(whole, 120)
        assert (turn["output_ids"], report) == (plain["output_ids"], compression(plain))
    replaced = say(client, {**parent, "offset": 20, "replace": True}, prompt(4, 12))
    client.flush()
    assert replaced["output_ids"] == client.generate(prompt(1, 40)[:20] + prompt(4, 12), 120)["output_ids"]


def test_session_after_a_conversation(session):
    """Prevents the two ways to continue a text from undoing each other."""
    client, name = session
    params = {"custom_params": {"triattention": {"conversation": "in a session"}}}
    first = say(client, {"id": name}, prompt(5, 40), **params)
    second = say(client, {"id": name, "rid": first["meta_info"]["id"]}, prompt(6, 12), **params)
    assert compression(second)["conversation"] == "resumed"
    assert second["meta_info"]["cached_tokens"] == 40 + 119
    assert second["meta_info"]["prompt_tokens"] == 40 + 120 + 12


@contextmanager
def paused(client: Client, mode: str):
    assert client.post("/pause_generation", mode=mode).status_code == 200
    try:
        yield
    finally:
        # Otherwise its requests, and whoever waits for them, would never end.
        assert client.post("/continue_generation").status_code == 200


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_pause_and_continue(serve, mode):
    """Prevents rounds on a paused server, and slots that are lost when its requests resume or restart."""
    client = serve("--page-size", "1")
    client.flush()
    prompts = [prompt(20 + seed, 30) for seed in range(4)]
    undisturbed = client.generate_all(prompts, 400) if mode == "in_place" else []
    client.flush()
    before = client.totals()["rounds"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate_all, prompts, 400)
        while client.totals()["rounds"] < before + len(prompts) and not running.done():
            time.sleep(0.02)
        with paused(client, mode):
            if mode != "abort":
                frozen = client.totals()
                time.sleep(0.5)
                assert client.totals() == frozen
                assert not running.done(), "the requests ended before the pause, so that nothing was tested"
            if mode == "retract":
                # SGLang returns what retracted requests held, and can empty the tree below them.
                client.flush(wait_s=0)
        answers = running.result()
    for answer in answers:
        report = compression(answer)
        assert report["rounds"] >= 1
        assert answer["meta_info"]["finish_reason"]["type"] == ("abort" if mode == "abort" else "length")
        if mode != "abort":
            assert answer["meta_info"]["completion_tokens"] == 400
            assert report["logical_length"] == 30 + 399
            assert report["physical_length"] <= 30 + BUDGET + INTERVAL
    for answer, expected in zip(answers, undisturbed, strict=False):
        assert (answer["output_ids"], compression(answer)) == (expected["output_ids"], compression(expected))
    assert_pool_is_whole(client)
