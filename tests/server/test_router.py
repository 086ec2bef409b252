"""Two replicas, each its own server, with SGLang's router."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import requests

import server
from forked_servers import running_launch, running_router
from harness import STRICT, Client, assert_pool_is_whole, compressed_args, compression, greedy, prompt
from router_replicas import cached_after_prefixes, wait_for_rounds
from run_router import SPREAD, wait_for_workers
from word_tokenizer import text as words

REPLICAS = 2
KEY = "X-SMG-Routing-Key"


class Fleet:
    """The replicas, which can be killed and started again at their ports."""

    def __init__(self, forkserver, model, folder) -> None:
        self._forkserver, self._model, self._folder = forkserver, model, folder
        self._ports = [server.free_port() for _ in range(REPLICAS)]
        self._stacks = [ExitStack() for _ in self._ports]
        self.clients = [self._start(number) for number in range(REPLICAS)]

    @property
    def urls(self) -> list[str]:
        return [client.url for client in self.clients]

    def _start(self, number: int) -> Client:
        port = self._ports[number]
        args = compressed_args(self._model, "--page-size", "1", "--enable-cache-report")
        args += ["--triattention-name-fields", KEY]
        args.remove("--skip-tokenizer-init")
        command = server.launch_command(self._model.path, port, args)
        log = self._folder / f"replica-{number}.log"
        launch = running_launch(self._forkserver, command[command.index("-m") + 1 :], port, STRICT, log)
        return Client(self._stacks[number].enter_context(launch))

    def kill(self, number: int) -> None:
        os.killpg(self.clients[number].server.process.pid, signal.SIGKILL)

    def restart(self, number: int) -> None:
        self._stacks[number].close()
        self.clients[number] = self._start(number)

    def stop(self) -> None:
        for stack in self._stacks:
            stack.close()


@pytest.fixture(scope="module")
def fleet(forkserver, chat_model, tmp_path_factory):
    running = Fleet(forkserver, chat_model, tmp_path_factory.mktemp("replicas"))
    yield running
    running.stop()


@pytest.fixture
def routed(forkserver, fleet, tmp_path):
    """`routed(*args)` is the context of a client of a router with these arguments in front of the fleet."""

    @contextmanager
    def start(*args: str):
        with running_router(forkserver, fleet.urls, tmp_path / "router.log", *args) as router:
            yield Client(router)

    return start


def turn(client: Client, text: str, name: str, **headers: str) -> tuple[str, int]:
    """A conversation's answer, and the number of tokens that were not computed again.

    By the only endpoint of which the router passes on a field that it does not know.
    """
    body = {
        "model": "default",
        "prompt": text,
        **{"max_tokens": 120, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False},
        "custom_params": {"triattention": {"conversation": name}},
    }
    response = requests.post(client.url + "/v1/completions", json=body, headers=headers, timeout=600)
    assert response.status_code == 200, response.text
    answer = response.json()
    details = answer["usage"]["prompt_tokens_details"] or {"cached_tokens": 0}
    return answer["choices"][0]["text"], details["cached_tokens"]


@pytest.mark.wide
def test_prefixes_are_found(fleet, routed):
    """Prevents requests from being spread so that no replica has their prefix, and reports that the router drops."""
    with routed(*SPREAD) as client:
        answers = cached_after_prefixes(client, lambda: [each.totals()["rounds"] for each in fleet.clients], 200)
    for answer in answers:
        assert 200 <= answer["meta_info"]["cached_tokens"] < 210
        assert compression(answer)["rounds"] > 0


@pytest.mark.wide
def test_conversations_stay_with_their_replica(fleet, routed):
    """Prevents a turn from being sent to a replica that does not have its row, and one that is sent there from being
    answered as if it had."""
    names = [f"talk {number}" for number in range(2)]
    texts = {name: words(30 + number, 40) for number, name in enumerate(names)}
    resumed = sum(client.totals()["conversations_resumed"] for client in fleet.clients)
    with routed("--policy", "manual", "--assignment-mode", "min_group") as client:
        for number in range(3):
            for name in names:
                answer, cached = turn(client, texts[name], name, **{KEY: name})
                # All but the message and the last token of the answer before.
                assert cached == (0 if number == 0 else 40 + 130 * number - 11)
                texts[name] += answer + " " + words(40, 10)
    assert sum(client.totals()["conversations_parked"] for client in fleet.clients) == 2
    assert sum(client.totals()["conversations_resumed"] for client in fleet.clients) == resumed + 4
    # One of the replicas has the row; the other prefills the whole text, which is exact.
    found = [turn(client, texts["talk 0"], "talk 0")[1] for client in fleet.clients]
    assert sorted(found) == [0, 40 + 130 * 3 - 11]
    for client in fleet.clients:
        assert_pool_is_whole(client)


@pytest.mark.wide
def test_custom_params_are_lost(fleet, routed):
    """Prevents documents that promise settings of requests where the router drops them."""
    sampling = greedy(4, custom_params={"triattention": {"budgt": 8}})
    with routed("--policy", "round_robin") as client:
        bodies = [("/generate", {"input_ids": prompt(80, 5), "sampling_params": sampling})]
        chat = {"model": "default", "messages": [{"role": "user", "content": "one"}], "max_tokens": 4}
        bodies += [("/v1/chat/completions", {**chat, "custom_params": sampling["custom_params"]})]
        for path, body in bodies:
            assert client.post(path, **body).status_code == 200
            assert fleet.clients[0].post(path, **body).status_code == 400
        plain = {"model": "default", "prompt": "one", "max_tokens": 4, "custom_params": sampling["custom_params"]}
        assert client.post("/v1/completions", **plain).status_code == 400


def test_a_routing_key_names_a_conversation(fleet, routed):
    """Prevents chats that pass the router, which drops custom_params and our headers, from resuming nothing."""
    messages, before = [], sum(client.totals()["conversations_resumed"] for client in fleet.clients)
    # Specials are left out of a text, which would then have other ids.
    body = {"model": "default", "max_tokens": 120, "temperature": 0, "ignore_eos": True}
    body["logit_bias"] = {"0": -100, "1": -100, "2": -100}
    headers = {KEY: "a talk", "X-TriAttention-Conversation": "", "X-TriAttention": "neither arrives"}
    with routed("--policy", "manual") as client:
        for number in range(2):
            messages.append({"role": "user", "content": words(90 + number, 30)})
            url = client.url + "/v1/chat/completions"
            response = requests.post(url, json={**body, "messages": messages}, headers=headers, timeout=600)
            assert response.status_code == 200, response.text
            messages.append(response.json()["choices"][0]["message"])
    assert sum(client.totals()["conversations_resumed"] for client in fleet.clients) == before + 1
    for client in fleet.clients:
        assert_pool_is_whole(client)


@pytest.mark.wide
def test_replica_is_killed_and_comes_back(fleet, routed):
    """Prevents one replica's end from taking another's requests along, a router that never takes it up again, and a
    leak in the survivor, whose every slot is counted around each round."""
    survivor, _killed = fleet.clients

    def ask(client: Client, number: int) -> requests.Response:
        body = {"input_ids": prompt(50 + number, 40), "sampling_params": greedy(600)}
        return requests.post(client.url + "/generate", json=body, timeout=600)

    with routed("--policy", "round_robin") as client, ThreadPoolExecutor(8) as threads:
        before = [each.totals()["rounds"] for each in fleet.clients]
        futures = [threads.submit(ask, client, number) for number in range(8)]
        for each, rounds in zip(fleet.clients, before, strict=True):
            wait_for_rounds([each], rounds + 4)
        assert not any(future.done() for future in futures)
        fleet.kill(1)
        answers = [future.result() for future in futures]
        whole = [answer.json() for answer in answers if answer.status_code == 200]
        assert len(whole) >= 4
        assert all(answer["meta_info"]["completion_tokens"] == 600 for answer in whole)
        wait_for_workers(client.server, [survivor.url])
        for number in range(2):
            assert compression(client.generate(prompt(60 + number, 40), 100))["rounds"] > 0
        assert_pool_is_whole(survivor)
        fleet.restart(1)
        wait_for_workers(client.server, fleet.urls)
        for number in range(2):
            assert compression(client.generate(prompt(70 + number, 40), 100))["rounds"] > 0
    assert all(each.totals()["rounds"] > 0 for each in fleet.clients)
    for each in fleet.clients:
        assert_pool_is_whole(each)
