"""Launches and requests that SGLang's users reported trouble with, compressed.

Each case names the public report in github.com/sgl-project/sglang that it follows. What happened at the first try is
what the assertion says, unless a comment names another outcome.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import requests

from forked_servers import run_module
from harness import BUDGET, INTERVAL, STRICT, Client, assert_pool_is_whole, compressed_args, compression, greedy, prompt
from server import free_port, launch_command

pytestmark = pytest.mark.wide

ANSWER = 200
ASKED = {"custom_params": {"triattention": {}}}


@dataclass(frozen=True)
class Launch:
    """
    Attributes:
        report: number of the issue or pull request.
        flags: those that it is about.
    """

    report: int
    flags: tuple[str, ...]


EVENTS = '{"publisher": "zmq", "topic": "kv-events", "endpoint": "tcp://*:0"}'
YARN = '{"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}}'
SAME_ANSWERS = {
    "longest output first": Launch(6276, ("--schedule-policy", "lof", "--max-running-requests", "2")),
    "several steps a batch": Launch(23131, ("--num-continuous-decode-steps", "4")),
    "events for a router": Launch(6098, ("--kv-events-config", EVENTS)),
    "all of a production line": Launch(
        9398,
        (
            *("--served-model-name", "mine", "--host", "0.0.0.0", "--enable-cache-report", "--show-time-cost"),
            *("--log-requests", "--log-requests-level", "3", "--enable-request-time-stats-logging"),
            *("--max-prefill-tokens", "64", "--schedule-conservativeness", "0.5", "--skip-server-warmup"),
        ),
    ),
    "least frequently used": Launch(5958, ("--radix-eviction-policy", "lfu")),
    "few words at a time": Launch(215, ("--stream-interval", "7", "--batch-notify-size", "4")),
}


def answers(client: Client) -> list[dict]:
    """Two answers, one after the other, the second to a prompt that shares its start with the first."""
    stem = prompt(70, 40)
    return [client.generate(ids, ANSWER, logprobs=True) for ids in (stem, stem + prompt(71, 30))]


@pytest.mark.parametrize("name", SAME_ANSWERS)
def test_a_launch_that_changes_no_answer(serve, name):
    """Prevents a setting that has nothing to do with compression from changing what is kept, or from losing slots."""
    launch, usual = SAME_ANSWERS[name], serve()
    usual.flush()
    expected = answers(usual)
    client = serve(*launch.flags)
    for ours, theirs in zip(answers(client), expected, strict=True):
        assert compression(ours) == compression(theirs)
        assert compression(ours)["rounds"] == (ANSWER - BUDGET) // INTERVAL
        assert ours["output_ids"] == theirs["output_ids"]
        assert ours["meta_info"]["output_token_logprobs"] == theirs["meta_info"]["output_token_logprobs"]
    together = client.generate_all([prompt(seed, 50) for seed in range(80, 86)], ANSWER)
    assert all(compression(each)["rounds"] for each in together)
    assert_pool_is_whole(client)
    serve.stop(client)


def test_a_longer_context_than_the_model_has(forkserver, tiny, tmp_path):
    """Prevents scores by another rotary embedding than a launch with YaRN serves; report 4048.

    Statistics of the model without YaRN are refused.
    """
    flags = ["--json-model-override-args", YARN, "--context-length", "2048", *compressed_args(tiny)]
    command = launch_command(tiny.path, free_port(), flags)
    ended = run_module(forkserver, command[command.index("-m") + 1 :], STRICT, tmp_path / "log")
    assert ended.code == 2
    assert "RoPE attention scaling is 1.0 there and 1.138" in ended.error
    assert "Traceback" not in ended.output


def test_a_full_queue(serve):
    """Prevents a refused request from holding a row or a conversation's name; reports 24070 and 19035."""
    client = serve("--max-running-requests", "1", "--max-queued-requests", "2")

    def ask(number: int) -> requests.Response:
        named = {"triattention": {"conversation": f"queue {number}"}}
        sampling = greedy(150, custom_params=named)
        return client.post("/generate", input_ids=prompt(number, 20), sampling_params=sampling, rid=f"queue {number}")

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ask, range(8)))
    assert {each.status_code for each in found} == {200, 503}
    refused = next(number for number, each in enumerate(found) if each.status_code == 503)
    again = ask(refused)
    assert again.status_code == 200, again.text
    assert compression(again.json())["conversation"] == "new"
    assert_pool_is_whole(client)
    serve.stop(client)


def test_prompts_that_are_cut(serve):
    """Prevents a prompt that SGLang shortens from being accounted for in full; reports 8096 and 5409."""
    client = serve("--allow-auto-truncate", "--max-total-tokens", "512")
    response = client.generate(prompt(73, 700), 40, **ASKED)
    assert response["meta_info"]["prompt_tokens"] < 512
    assert response["meta_info"]["finish_reason"]["type"] == "length"
    assert_pool_is_whole(client)
    serve.stop(client)


def test_hidden_states_of_a_compacted_answer(serve):
    """Prevents hidden states that are lost or doubled where a round comes between two steps; report 4997."""
    client = serve("--enable-return-hidden-states")
    batch = [prompt(seed, 30) for seed in (74, 75, 76)]
    asked = {"input_ids": batch, "sampling_params": greedy(ANSWER), "return_hidden_states": True}
    for response in client.post("/generate", **asked).json():
        found = response["meta_info"]["hidden_states"]
        assert len(found) == ANSWER
        assert compression(response)["rounds"] > 3
    assert_pool_is_whole(client)
    serve.stop(client)


def test_a_thinking_budget(serve):
    """Prevents the parameters of a processor and those of compression from displacing one another; report 24517."""
    from sglang.srt.sampling.custom_logit_processor import Qwen3ThinkingBudgetLogitProcessor as Processor

    class Thinking(Processor):
        THINKING_START_TOKEN_ID, THINKING_END_TOKEN_ID, NEW_LINE_TOKEN_ID = 3, 4, 5

    client = serve("--enable-custom-logit-processor")
    response = client.post(
        "/generate",
        input_ids=[*prompt(77, 30), 3],
        sampling_params=greedy(ANSWER, custom_params={"thinking_budget": 120, "triattention": {"budget": 48}}),
        custom_logit_processor=Thinking.to_str(),
    ).json()
    first = response["output_ids"].index(4)
    assert 110 < first < 130
    assert compression(response)["rounds"] == 4
    assert_pool_is_whole(client)
    serve.stop(client)


def test_a_request_id_twice(serve):
    """Prevents the second request of a name from ending the server or the first one's compression; report 8089."""
    client = serve()

    def ask() -> requests.Response:
        return client.post("/generate", rid="the same", input_ids=prompt(78, 20), sampling_params=greedy(300))

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(lambda _: ask(), range(2)), key=lambda each: each.status_code)
    assert [each.status_code for each in found] == [200, 400]
    assert compression(found[0].json())["rounds"] > 5
    assert_pool_is_whole(client)


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
def test_a_pause_in_the_middle_of_answers(serve, mode):
    """Prevents rows that outlive a pause, or answers that differ after one; reports 20272 and 23668."""
    client = serve()
    prompts = [prompt(seed, 30) for seed in (130, 131)]
    expected = [client.generate(ids, 400) for ids in prompts]
    client.flush()
    before = client.totals()["rounds"]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client.generate, ids, 400) for ids in prompts]
        while client.totals()["rounds"] < before + 6:
            time.sleep(0.02)
        assert client.post("/pause_generation", mode=mode).status_code == 200
        assert client.post("/continue_generation").status_code == 200
        found = [each.result() for each in running]
    reasons = {each["meta_info"]["finish_reason"]["type"] for each in found}
    assert reasons == ({"abort"} if mode == "abort" else {"length"})
    if mode == "in_place":
        assert [each["output_ids"] for each in found] == [each["output_ids"] for each in expected]
    assert client.post("/pause_generation", mode=mode).status_code == 200, "nothing runs"
    assert client.post("/continue_generation").status_code == 200
    assert_pool_is_whole(client)


def test_maintenance_in_the_middle_of_an_answer(serve):
    """Prevents what operators call on a busy server from disturbing its rounds; report 6914."""
    client = serve()
    expected = client.generate(prompt(132, 30), 400)
    client.flush()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, prompt(132, 30), 400)
        assert client.post("/freeze_gc").status_code == 200
        assert requests.get(f"{client.url}/server_info", timeout=60).status_code == 200
        assert requests.get(f"{client.url}/v1/loads", timeout=60).status_code == 200
        found = running.result()
    assert found["output_ids"] == expected["output_ids"]
    assert compression(found) == compression(expected)
    assert_pool_is_whole(client)


@pytest.mark.parametrize("sampling", [{"max_new_tokens": None}, {"max_new_tokens": 0}, {"max_new_tokens": 1}])
def test_lengths_that_clients_send(serve, sampling):
    """Prevents an answer of no length, or without a limit, from having no bound; reports 4048 and 4511."""
    client = serve("--max-total-tokens", "1024", "--context-length", "400")
    params = {"temperature": 0, "ignore_eos": True, **sampling}
    response = client.post("/generate", input_ids=prompt(133, 30), sampling_params=params)
    assert response.status_code == 200, response.text
    report = response.json()["meta_info"]
    if sampling.get("max_new_tokens", 1) is None:
        assert report["completion_tokens"] > 300
        assert report["triattention"]["rounds"] > 5
    assert_pool_is_whole(client)


def test_a_prompt_of_another_servers_prefill(serve):
    """Prevents a client's `bootstrap_host`, which keeps a prompt out of the tree, from keeping its slots; report 36855.

    The report is of prompts that take several chunks, which end SGLang without compression too.
    """
    client = serve()
    asked = {"input_ids": prompt(134, 60), "sampling_params": greedy(ANSWER), "bootstrap_host": "2.2.2.2"}
    response = client.post("/generate", **asked)
    assert response.status_code == 200, response.text
    assert compression(response.json())["rounds"] > 3
    assert_pool_is_whole(client)
