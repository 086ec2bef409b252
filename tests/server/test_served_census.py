"""The census on a real server: a slot that a foreign plugin gives two owners ends the server with one sentence."""

from __future__ import annotations

import re
import time
from contextlib import suppress

import pytest
import requests

import forked_servers
from harness import BUDGET, INTERVAL, STRICT, Client, compressed_args, install_plugin, prompt, python_path

# Replaces one slot of a running request with a slot of the tree. SGLang's own checks, which only count, see nothing.
FAULT = """
def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", corrupt, HookType.BEFORE)


def corrupt(scheduler, batch, *_, **__):
    request = batch.reqs[0]
    if batch.forward_mode.is_decode() and len(request.output_ids) == 20 and request.rid == "victim":
        row = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx]
        row[request.kv.cache_protected_len] = row[0]
"""


@pytest.fixture
def corrupted(forkserver, tiny, tmp_path):
    """`corrupted(env)` returns a running server with the plugin and the path of its log."""
    install_plugin(tmp_path, "fault", FAULT)
    log = tmp_path / "server.log"

    def start(env: dict[str, str]):
        env = {**STRICT, "PYTHONPATH": python_path(tmp_path), **env}
        return forked_servers.running_server(
            forkserver, tiny.path, compressed_args(tiny, "--page-size", "1"), env, log
        ), log

    return start


def ask(server, tokens: int) -> requests.Response:
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return Client(server).post("/generate", rid="victim", input_ids=prompt(1, 40), sampling_params=sampling)


def test_a_fault_ends_the_server_with_a_sentence(corrupted):
    """Prevents a server from continuing with a round, and answers, once two owners write to one slot."""
    running, log = corrupted({})
    with running as server:
        with suppress(requests.ConnectionError):
            assert ask(server, BUDGET + INTERVAL + 20).status_code != 200
        deadline = time.monotonic() + 60
        while server.process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
        assert server.process.poll() is not None, "the server goes on"
    sentence = r"Integrity: before the rounds of step \d+, slot \d+ belongs to request victim and to the tree\."
    assert re.search(sentence, log.read_text()), log.read_text()[-3000:]


def test_off_by_default(corrupted):
    """Prevents servers from waiting for the device at every step unasked, and a test above that proves nothing."""
    running, _ = corrupted({"SGLANG_TRIATTN_CHECK": "0"})
    with running as server:
        assert ask(server, 25).status_code == 200
