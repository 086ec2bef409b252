"""A compressing server that is killed under load, as a kernel out of memory does it, and started again."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import psutil
import pytest
import requests

import server
from forked_servers import running_launch
from harness import STRICT, Client, assert_pool_is_whole, compressed_args, compression, greedy, prompt, served_logprobs
from sets import wide

PORT = server.free_port()
RUNNING = 6
CONVERSATION = {"triattention": {"conversation": "killed"}}
ENDS_S = 60
"""SGLang looks for dead processes about once a second."""


@pytest.fixture
def launch(forkserver, tiny, tmp_path):
    """`launch()` starts the server, always with the same arguments, at the same port."""

    def start():
        command = server.launch_command(tiny.path, PORT, compressed_args(tiny, "--page-size", "16"))
        log = tmp_path / "server.log"
        return running_launch(forkserver, command[command.index("-m") + 1 :], PORT, STRICT, log)

    return start


def ask(client: Client, seed: int) -> requests.Response:
    """An answer that does not end while the test waits; half of them are streamed."""
    body = {"input_ids": prompt(seed, 40), "sampling_params": greedy(4000), "stream": seed % 2 == 0}
    return requests.post(client.url + "/generate", json=body, timeout=600)


def load(client: Client, threads: ThreadPoolExecutor) -> list[Future]:
    """Requests that are still running, after rounds of each, and a conversation that waits for its next turn."""
    turn = client.post("/generate", input_ids=prompt(50, 40), sampling_params=greedy(150, custom_params=CONVERSATION))
    assert compression(turn.json())["conversation_kept"]
    before = client.totals()["rounds"]
    futures = [threads.submit(ask, client, 60 + number) for number in range(RUNNING)]
    deadline = time.monotonic() + 300
    while client.totals()["rounds"] < before + 3 * RUNNING:
        assert time.monotonic() < deadline, "no rounds"
        time.sleep(0.1)
    assert not any(future.done() for future in futures)
    return futures


def process_of(client: Client, role: str) -> int:
    """The scheduler's process id, or that of the server, which leads the others."""
    leader = psutil.Process(client.server.process.pid)
    if role == "server":
        return leader.pid
    # Forked processes have no titles; under load, none computes as much.
    return max(leader.children(recursive=True), key=lambda child: child.cpu_times().user).pid


def wait_until_ended(client: Client) -> None:
    deadline = time.monotonic() + ENDS_S
    while server.session_members(client.server.process.pid):
        client.server.process.poll()
        assert time.monotonic() < deadline, f"still running: {server.session_members(client.server.process.pid)}"
        time.sleep(0.1)
    assert client.server.process.poll() != 0


def answered(future: Future) -> bool:
    """Whether a request got a whole answer."""
    try:
        response = future.result()
        return response.status_code == 200 and '"finish_reason":{"type":"length"' in response.text
    except requests.RequestException:
        return False


@pytest.mark.parametrize("role", ["scheduler", wide("server")])
def test_killed_under_load(launch, role):
    """Prevents processes that outlive a killed one with their memory, clients that wait for ever, and a next server
    that cannot have the port, or answers differently."""
    with ThreadPoolExecutor(RUNNING) as threads, launch() as running:
        client = Client(running)
        before = client.generate(prompt(7, 40), 150, logprobs=True)
        futures = load(client, threads)
        os.kill(process_of(client, role), signal.SIGKILL)
        assert not wait(futures, timeout=ENDS_S).not_done, "clients still wait"
        assert not any(map(answered, futures))
        wait_until_ended(client)
        assert ("Subprocess scheduler_0" in running.log_path.read_text()) == (role == "scheduler")
    with launch() as running:
        client = Client(running)
        after = client.generate(prompt(7, 40), 150, logprobs=True)
        assert after["output_ids"] == before["output_ids"]
        assert (served_logprobs(after)[0] == served_logprobs(before)[0]).all()
        assert compression(after) == compression(before)
        sampling = greedy(4, custom_params=CONVERSATION)
        turn = client.post("/generate", input_ids=prompt(50, 40), sampling_params=sampling).json()
        assert compression(turn)["conversation"] == "new"
        assert_pool_is_whole(client)
