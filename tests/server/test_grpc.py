"""A server of `--smg-grpc-mode`, asked by gRPC as SMG's gateway does."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
import requests
import torch

import faulty_rounds
import forked_servers
from disaggregated_servers import TRANSFER
from documents import DOCS, example
from grpc_client import Answer, GrpcClient
from harness import (
    BUDGET,
    SABOTAGE,
    STRICT,
    compressed_args,
    greedy,
    install_plugin,
    plain_args,
    prompt,
    python_path,
    two_cores,
)
from oracle import TOLERANCE, Oracle, oracle_of
from server import free_port, launch_command
from word_tokenizer import with_tokenizer

# The server warms up with token ids of a vocabulary of 128,256.
ENV = {**STRICT, "SMG_SGLANG_SERVICER_WARMUP": "off"}
PREFERRED = '{"custom_params": {"triattention": {"budget": 40}}}'


@contextmanager
def grpc_server(forkserver, model, log: Path, *flags: str, env: dict[str, str] | None = None):
    """The client of a server; `metrics` of it is the port of its metrics."""
    port, metrics = free_port(), free_port()
    command = ["sglang.launch_server", "--model-path", str(model.path), "--smg-grpc-mode", "--port", str(port)]
    command += ["--smg-http-sidecar-port", str(metrics), *compressed_args(model, "--page-size", "1", *flags)]
    with forked_servers.running_process(forkserver, command, {**ENV, **(env or {})}, log) as process:
        client = GrpcClient(port, metrics)
        client.wait_until_serving(process)
        yield client


@pytest.fixture(scope="module")
def client(forkserver, tiny, tmp_path_factory):
    flags = ("--triattention-conversations", "auto")
    with grpc_server(forkserver, tiny, tmp_path_factory.mktemp("grpc") / "log", *flags) as client:
        yield client


def error(account: Oracle, ids: list[int], answer: Answer) -> float:
    """How far an answer's log-probabilities are at most from those of an account, which has as many rounds."""
    expected, rounds = account.logprobs(ids + answer.output_ids[:-1], len(ids), len(ids))
    assert rounds in (0, answer.report["rounds"])
    return (
        (expected.gather(1, torch.tensor(answer.output_ids)[:, None])[:, 0] - torch.tensor(answer.logprobs)).abs().max()
    )


@pytest.mark.parametrize("stream", [False, True])
def test_logits(client, tiny, stream):
    """Prevents requests by gRPC that are not compressed, or by other settings, and answers without a report."""
    account, ids = oracle_of(tiny), prompt(5, 50)
    asked = Oracle(**{**vars(account), "interval": 16})
    answer = client.generate(ids, 240, {"interval": 16}, stream=stream)
    assert answer.report["rounds"] >= 5
    assert error(asked, ids, answer) < TOLERANCE
    dense = Oracle(**{**vars(account), "budget": 10_000})
    assert error(dense, ids, answer) > 50 * TOLERANCE
    declined = client.generate(ids, 240, {"enabled": False}, stream=stream)
    assert declined.report["rounds"] == 0
    assert error(dense, ids, declined) < TOLERANCE
    client.flush()


@pytest.mark.parametrize("named", [{"conversation": "a"}, {}], ids=["named", "auto"])
def test_a_conversation(client, named):
    """Prevents a turn by gRPC that prefills its history again, also of clients that the gateway lets bring no name."""
    ids = prompt(6, 40)
    first = client.generate(ids, 150, named)
    history = ids + first.output_ids
    second = client.generate([*history, *prompt(7, 9)], 60, {**named, "release": True})
    assert (first.report["conversation"], second.report["conversation"]) == ("new", "resumed")
    assert second.cached >= len(history) - 1
    client.flush()


def test_the_example(client, forkserver, tmp_path):
    """Prevents an example of the documents that does not work."""
    script = tmp_path / "example.py"
    source = example(DOCS / "clients.md", "gRPC", "python")
    script.write_text(source.replace("localhost:30001", f"127.0.0.1:{client.port}"))
    ended = forked_servers.run_script(forkserver, script, [], {})
    assert ended.code == 0, ended.output[-3000:]
    assert f"'rounds': {(399 - 64) // 32}," in ended.output.splitlines()[-1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"budget": BUDGET + 1}, ["custom_params.triattention.budget is 65", "what the server was started with"]),
        ({"interval": 2.5}, ["custom_params.triattention.interval is 2.5", "a whole number of tokens"]),
        ({"bugdet": 8}, ["custom_params.triattention.bugdet is not a setting of a request"]),
        ({"enabled": False, "conversation": "a"}, ["conversation does not work with enabled false"]),
    ],
)
def test_bad_settings(client, settings, words):
    """Prevents a mistake in a request from being ignored, or from ending anything but the request."""
    with pytest.raises(grpc.RpcError) as caught:
        client.generate(prompt(5, 9), 4, settings)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    for text in words:
        assert text in caught.value.details()
    assert client.is_serving()


def test_storm(client):
    """Prevents slots and rows that are lost where clients leave, or ask for several answers: SGLang's own checks, which
    are on, end the scheduler at the first."""
    before = client.generate(prompt(8, 40), 150)
    client.flush()

    def one(number: int) -> bool:
        rng = random.Random(number)
        settings = rng.choice([None, {"enabled": False}, {"budget": 24}, {"prompt": "compact"}, {"conversation": "b"}])
        ids = prompt(number % 3, 60) + prompt(100 + number, rng.choice([1, 40, 150]))
        answers = 2 if number % 3 == 2 else 1
        call = client.call(ids, rng.choice([1, 60, 200]), settings, stream=number % 2 == 0, answers=answers)
        if number % 4 == 0:
            time.sleep(rng.uniform(0.1, 1.0))
            return call.cancel()
        return sum(part.HasField("complete") for part in call) == answers

    with ThreadPoolExecutor(12) as pool:
        assert all(pool.map(one, range(60)))
    client.flush()
    assert client.generate(prompt(8, 40), 150) == before
    metrics = requests.get(f"http://127.0.0.1:{client.metrics}/metrics", timeout=60).text
    assert "sglang_triattention_evicted_tokens_total{" in metrics


def test_first_launch_of_replicas(forkserver, tiny, tmp_path):
    """Prevents replicas that do not answer the launch, or cannot measure at it, and the operator's preferred settings
    from being lost by gRPC."""
    model = with_tokenizer(tiny, tmp_path / "model")
    flags = ("--triattention-stats", "auto", "--dp-size", "2", "--preferred-sampling-params", PREFERRED)
    env = {**two_cores(), "XDG_CACHE_HOME": str(tmp_path)}
    with grpc_server(forkserver, model, tmp_path / "log", *flags, env=env) as client:
        ids = prompt(9, 30)
        for settings, budget in ((None, 40), ({}, BUDGET), ({"budget": 48}, 48)):
            answers = [client.generate(ids, 200, settings) for _ in range(2)]
            for answer in answers:
                assert answer.report["rounds"] >= 2
                assert answer.report["physical_length"] - len(ids) in range(budget, budget + 33), settings


def test_compression_that_has_stopped(forkserver, tiny, tmp_path):
    """Prevents a gateway from counting on a server that compresses nothing any more."""
    install_plugin(tmp_path / "plugin", "faulty", Path(faulty_rounds.__file__).read_text())
    fault = tmp_path / "fault"
    fault.write_text("score always")
    env = {"PYTHONPATH": python_path(tmp_path / "plugin"), "FAULT_FILE": str(fault)}
    with grpc_server(forkserver, tiny, tmp_path / "log", env=env) as client:
        assert client.is_healthy()
        with pytest.raises(grpc.RpcError) as caught:
            client.generate(prompt(5, 30), 150)
        assert "Compression of this request failed on the server" in caught.value.details()
        assert client.generate(prompt(5, 30), 150).report["rounds"] == 0
        assert not client.is_serving()
        assert not client.is_healthy()
        # The process is not to be restarted.
        assert client.is_serving("")


@pytest.mark.wide
def test_a_decode_server(forkserver, tiny, tmp_path):
    """Prevents a decode server that gets its requests by gRPC from leaving them uncompressed."""
    host, port, bootstrap = "127.0.0.1", free_port(), free_port()
    common = [*TRANSFER, "--page-size", "1", "--disaggregation-bootstrap-port", str(bootstrap)]
    command = launch_command(tiny.path, port, [*plain_args(), *common, "--disaggregation-mode", "prefill"])
    started = command[command.index("-m") + 1 :]
    account, ids = oracle_of(tiny), prompt(5, 50)
    with (
        forked_servers.running_launch(forkserver, started, port, STRICT, tmp_path / "prefill.log") as prefill,
        grpc_server(forkserver, tiny, tmp_path / "log", *common, "--disaggregation-mode", "decode") as client,
        ThreadPoolExecutor(1) as pool,
    ):
        place = {"bootstrap_host": host, "bootstrap_port": bootstrap, "bootstrap_room": 7}
        body = {"input_ids": ids, "sampling_params": greedy(240), "return_logprob": True, **place}
        sent = pool.submit(requests.post, f"{prefill.url}/generate", json=body, timeout=120)
        answer = client.generate(ids, 240, place=place)
        assert sent.result().status_code == 200
        assert answer.report["rounds"] >= 5
        assert error(account, ids, answer) < TOLERANCE


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-total-tokens", "96"], ["first round at 100 tokens or more", "the KV pool holds 96 tokens"]),
        (["--servicer-impl", "rust"], ["--servicer-impl rust does not work with --enable-triattention"]),
        (["--nnodes", "2"], ["--nnodes 2 does not work with --enable-triattention and --smg-grpc-mode True"]),
        ([], ["did not confirm"]),
    ],
    ids=["small pool", "rust", "nodes", "no plugin"],
)
def test_refused_launches(forkserver, tiny, tmp_path, flags, words):
    """Prevents a server that runs dense, or does not end, where the schedulers or the launch refuse."""
    env = dict(ENV)
    if not flags:
        install_plugin(tmp_path / "plugin", "sabotage", SABOTAGE)
        env["PYTHONPATH"] = python_path(tmp_path / "plugin")
    command = ["sglang.launch_server", "--model-path", str(tiny.path), "--smg-grpc-mode", "--port", str(free_port())]
    ended = forked_servers.run_module(forkserver, [*command, *compressed_args(tiny, *flags)], env, tmp_path / "log")
    assert ended.code == 2, ended.output[-3000:]
    for text in words:
        assert text in ended.error
