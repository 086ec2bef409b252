"""A prefill server, decode servers and SGLang's routers before them, on CPUs; and what the decode server answers."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import retraction_probe
import server
from forked_servers import Forkserver, running_launch, running_router
from harness import (
    KEYS_ALONE,
    STRICT,
    Client,
    assert_pool_is_whole,
    compressed_args,
    compression,
    greedy,
    install_plugin,
    plain_args,
    prompt,
    python_path,
    read_lines,
    served_logprobs,
)
from oracle import TOLERANCE, Oracle
from storm import retractions, retractions_logged
from tiny_model import TinyModel

TRANSFER = ("--disaggregation-transfer-backend", "process_memory")
# A tree of the decode server's own.
TREE = ("--disaggregation-decode-enable-radix-cache",)
# In every fifth step, SGLang retracts the request with the shortest answer so far, which hence grows by three tokens in
# five steps. Rounds come every 32 tokens, so one of three in a row falls in the step of a retraction.
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
# In a storm, whose requests are so many that some are retracted anyway.
RETRACT_NOW_AND_THEN = {**RETRACT, "SGLANG_TEST_RETRACT_INTERVAL": "20"}
# Tokens of each answer. When the others are complete, the shortest has had at least three rounds.
RETRACTED = 310


class Separated(Client):
    """A client of a decode server whose requests to generate go through a router, by way of the prefill server.

    Attributes:
        prefill: a client of the prefill server.
        retracted: how often the decode server has retracted requests that were sent together.
    """

    def __init__(self, router: server.Server, prefill: Client, decode: Client) -> None:
        super().__init__(decode.server)
        self._router = Client(router)
        self.prefill, self.retracted = prefill, 0

    def post(self, path: str, **body: Any) -> Any:
        return self._router.post(path, **body) if path == "/generate" else super().post(path, **body)

    def generate_each(
        self, asked: list[tuple[list[int], dict[str, Any]]], *, logprobs: bool = False
    ) -> list[dict[str, Any]]:
        """Sends each prompt in a request of its own: the router takes no sampling parameters for each of several."""
        with ThreadPoolExecutor(len(asked)) as pool:
            answers = list(pool.map(lambda each: self._generate(*each, logprobs, None), asked))
        self.retracted += retractions(answers)
        return answers


class Retractions:
    """What the ranks of a decode server retract, see `retraction_probe`.

    Attributes:
        env: for the server.
    """

    def __init__(self, folder: Path) -> None:
        install_plugin(folder, "retraction_probe", Path(retraction_probe.__file__).read_text())
        self._file = folder / "retractions.jsonl"
        self._file.touch()
        self.env = {"PYTHONPATH": python_path(folder), "PROBE_FILE": str(self._file)}

    def redrawn(self, answer: dict[str, Any], ranks: int = 1) -> set[int]:
        """Tokens of a request after which it was retracted in the step of its round, for an Oracle.

        Asserts that all ranks have retracted it, at the same tokens.
        """
        meta, seen = answer["meta_info"], defaultdict(list)
        for line in read_lines(self._file):
            if line["rid"] == meta["id"]:
                seen[line["rank"]].append((line["tokens"], line["shortened"]))
        retracted, *others = seen.values() or [[]]
        assert len(retracted) == meta["num_retractions"]
        assert len(seen) == ranks or not retracted
        assert all(other == retracted for other in others), seen
        return {tokens for tokens, shortened in retracted if shortened}


class Pairs:
    """A prefill server, and a decode server with a router of its own before it, for each call.

    Stands in for `serve` of the server tests, but keeps no pair running for another test.
    """

    def __init__(self, forkserver: Forkserver, folder: Path) -> None:
        self._forkserver, self._folder, self._started = forkserver, folder, 0
        self._running: dict[Separated, ExitStack] = {}

    def __call__(
        self,
        *args: str,
        model: TinyModel,
        env: dict[str, str] | None = None,
        compressed: bool = True,
        tokenizer: bool = False,
    ) -> Separated:
        """
        Args:
            args: for both servers; those of compression for the decode server alone.
            model: what both serve.
            env: added to the environment of both.
            compressed: whether the decode server compresses.
            tokenizer: whether the model has a tokenizer, so that requests may be texts.
        """
        self._started += 1
        folder = self._folder / f"pair-{self._started}"
        folder.mkdir()
        stack, env = ExitStack(), {**STRICT, **(env or {})}
        try:
            servers = DisaggregatedServers(self._forkserver, model, folder, stack, tokenizer)
            prefill = servers.prefill(_without_compression(args), env)
            given = compressed_args(model, *args) if compressed else [*plain_args(), *args]
            client = servers.decode(given, env, prefill)
        except BaseException:
            stack.close()
            raise
        self._running[client] = stack
        return client

    def stop(self, client: Separated) -> None:
        """Ends a pair after it has counted every slot of the prefill server's pool."""
        stack = self._running.pop(client)
        try:
            assert_pool_is_whole(client.prefill)
        finally:
            stack.close()

    def stop_all(self) -> None:
        for stack in self._running.values():
            stack.close()
        self._running.clear()


def assert_account(account: Oracle, ids: list[int], response: dict[str, Any], redrawn: Collection[int] = ()) -> None:
    """Asserts that the served log-probabilities are those of the account, over at least five rounds.

    Args:
        redrawn: see `Oracle.logprobs`.
    """
    report = compression(response)
    everything = ids + response["output_ids"][:-1]
    expected, rounds = account.logprobs(everything, len(ids), report["frozen_length"], redrawn=redrawn)
    assert report["rounds"] == rounds >= 5
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    dense, _ = replace(account, budget=10_000).logprobs(everything, len(ids), report["frozen_length"])
    assert (dense.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE


def hold_to_account(
    client: Separated,
    account: Oracle,
    retractions: Retractions,
    prompts: list[list[int]],
    ranks: int = 1,
    *,
    overlaps: bool = True,
) -> None:
    """Holds the answers of a decode server with `RETRACT` to an account.

    Args:
        ranks: those that share a request.
        overlaps: whether a step is queued while another is planned. Then some are retracted in the step of a round;
            else nothing is drawn again.
    """
    # Whether one is retracted in the step of a round depends on when they arrive.
    for _ in range(3):
        answers = client.generate_all(prompts, RETRACTED, logprobs=True)
        redrawn = [retractions.redrawn(answer, ranks) for answer in answers]
        if any(redrawn) or not overlaps:
            break
    assert any(redrawn) if overlaps else client.retracted > 9
    account = replace(account, overlap=overlaps)
    for ids, answer, again in zip(prompts, answers, redrawn, strict=True):
        assert_account(account, ids, answer, again if overlaps else ())
    assert_pool_is_whole(client)


def storm(client: Separated, most_private: int, requests: int = 15, tokens: int = 300) -> None:
    """Asks for more than the decode server's pool holds, at once, and aborts some of it.

    Args:
        most_private: KV entries of a request on top of its frozen ones.
        tokens: of the longer answers.
    """
    stem, retracted = prompt(70, 90), retractions_logged(client)

    def ask(number: int) -> dict[str, Any]:
        ids = [*stem, *prompt(71 + number, 10)] if number % 2 else prompt(71 + number, 20 + 9 * number)
        rid = f"storm-{number:03}"
        if number % 3 == 0:
            for each in (client, client.prefill):
                threading.Timer(0.5 + number / 4, Client.post, (each, "/abort_request"), {"rid": rid}).start()
        body = {"input_ids": ids, "sampling_params": greedy(tokens if number % 4 else 7)}
        return client.post("/generate", rid=rid, **body).json()

    with ThreadPoolExecutor(requests) as pool:
        answers = list(pool.map(ask, range(requests)))
    assert retractions_logged(client) > retracted + 2
    whole = [answer["meta_info"] for answer in answers if "meta_info" in answer]
    whole = [meta for meta in whole if meta["finish_reason"]["type"] == "length"]
    assert len(whole) >= requests * 2 // 3
    assert sum(client.rounds_by_rank()) > requests
    for meta in whole:
        report = meta["triattention"]
        assert report["physical_length"] <= report["frozen_length"] + most_private
    assert_pool_is_whole(client)
    assert_pool_is_whole(client.prefill)


@contextmanager
def running_separated(
    forkserver: Forkserver,
    tiny: TinyModel,
    folder: Path,
    *args: str,
    compressed: Sequence[bool] = (True,),
    decode: Sequence[str] = (),
    env: dict[str, str] | None = None,
) -> Iterator[list[Separated]]:
    """One prefill server, and a decode server for each of `compressed`, with a router of its own.

    What is compressed is chosen by keys alone.

    Args:
        args: for all servers.
        compressed: whether the decode servers compress; the prefill server does not.
        decode: more arguments of the decode servers.
        env: added to the environment of the decode servers.
    """
    with ExitStack() as stack:
        servers = DisaggregatedServers(forkserver, tiny, folder, stack)
        prefill = servers.prefill(args, STRICT)
        plans = [compressed_args(tiny, *KEYS_ALONE) if compresses else plain_args() for compresses in compressed]
        yield [servers.decode([*given, *args, *decode], {**STRICT, **(env or {})}, prefill) for given in plans]


class DisaggregatedServers:
    """Starts servers that an ExitStack ends."""

    def __init__(
        self, forkserver: Forkserver, tiny: TinyModel, folder: Path, stack: ExitStack, tokenizer: bool = False
    ) -> None:
        self._forkserver, self._tiny, self._folder, self._stack = forkserver, tiny, folder, stack
        self._tokenizer = tokenizer
        self._bootstrap = str(server.free_port())
        self._routed = 0

    def prefill(self, args: Sequence[str], env: dict[str, str]) -> Client:
        return self._start("prefill", [*plain_args(), *args, *self._mode("prefill")], env)

    def decode(self, args: Sequence[str], env: dict[str, str], prefill: Client) -> Separated:
        number = self._routed
        self._routed += 1
        decode = self._start(f"decode-{number}", [*args, *self._mode("decode")], env)
        # A router sends a failed request again, also one that was aborted. An abort may then meet one server's copy of
        # it alone, for which the other waits for SGLang's 300 s.
        routing = ["--pd-disaggregation", "--disable-retries"]
        routing += ["--prefill", prefill.url, self._bootstrap, "--decode", decode.url]
        log = self._folder / f"router-{number}.log"
        router = running_router(self._forkserver, [prefill.url, decode.url], log, *routing)
        return Separated(self._stack.enter_context(router), prefill, decode)

    def _mode(self, mode: str) -> list[str]:
        return [*TRANSFER, "--disaggregation-bootstrap-port", self._bootstrap, "--disaggregation-mode", mode]

    def _start(self, name: str, args: Sequence[str], env: dict[str, str]) -> Client:
        port = server.free_port()
        args = [word for word in args if not (self._tokenizer and word == "--skip-tokenizer-init")]
        command = server.launch_command(self._tiny.path, port, args)
        log = self._folder / f"{name}.log"
        launch = running_launch(self._forkserver, command[command.index("-m") + 1 :], port, env, log)
        return Client(self._stack.enter_context(launch))


def _without_compression(args: Sequence[str]) -> list[str]:
    """Arguments without those of compression, each of which has a value."""
    of_compression = {place for place, word in enumerate(args) if word.startswith("--triattention-")}
    return [word for place, word in enumerate(args) if not {place, place - 1} & of_compression]
