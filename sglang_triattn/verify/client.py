"""What `verify` sends to a server and reads of its answers."""

from __future__ import annotations

import json
import urllib.error
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPException
from typing import Any

from sglang_triattn.errors import TriAttentionError, first_line
from sglang_triattn.request.options import KEY
from sglang_triattn.verify.connection import Connection

COUNTERS = ("rounds", "evicted_tokens", "freed_slots")
_METRIC = "sglang:triattention_{}_total"
_TOP = 2


@dataclass(frozen=True)
class Ask:
    """One greedy request.

    Attributes:
        ids: the prompt.
        tokens: how many to generate; the end-of-text token does not end it.
        control: its fields of `custom_params.triattention`.
        logprobs_from: first prompt position whose log-probability is wanted; -1 for none.
    """

    ids: list[int]
    tokens: int
    control: dict[str, Any]
    logprobs_from: int = -1


@dataclass(frozen=True)
class Answer:
    """The answer to an `Ask`.

    Attributes:
        output: generated token ids.
        logprobs: of each of them, in nats.
        others: for each generated token, log-probabilities of the likeliest tokens by id.
        prompt_logprobs: of the prompt's tokens from `logprobs_from` on; the first has none and is left out.
        report: `meta_info["triattention"]`, {} without.
    """

    ask: Ask
    output: list[int]
    logprobs: list[float]
    others: list[dict[int, float]]
    prompt_logprobs: list[float]
    report: dict[str, Any]
    cached: int
    retractions: int


@dataclass(frozen=True)
class Load:
    """Sums over the replicas: KV slots that requests hold, and requests that run or wait."""

    used: int
    requests: int


@dataclass(frozen=True)
class State:
    """One look at a server.

    Attributes:
        info: `/server_info`.
        replicas: `triattention` of each replica; None for one that does not compress.
        metrics: sums of its counters by `COUNTERS`; None without --enable-metrics.
    """

    info: dict[str, Any]
    replicas: list[dict[str, Any] | None]
    metrics: dict[str, float] | None = field(default=None)

    def total(self, name: str) -> int:
        """A counter of `/server_info`, summed over the replicas."""
        return sum(replica[name] for replica in self.replicas if replica is not None)


class Client:
    """Requests to one server.

    Args:
        connection: to the server.
        timeout: seconds that one request may take.

    Raises:
        TriAttentionError: from every method: nothing answers, its certificate or the key is wrong, or it is not such a
            server.
    """

    def __init__(self, connection: Connection, timeout: float) -> None:
        self.url = connection.url
        self._connection, self._timeout = connection, timeout

    def state(self) -> State:
        """Settings and sums of a server that compresses."""
        not_sglang = TriAttentionError(
            f"{self.url} answers, but not as an SGLang server does: give the URL of an SGLang server."
        )
        try:
            content = self._read("/server_info")
        except _NotFoundError:
            raise not_sglang from None
        try:
            info = json.loads(content)
            replicas = [state.get(KEY) for state in info["internal_states"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            raise not_sglang from None
        if not any(replicas):
            raise TriAttentionError(
                f"{self.url} is an SGLang server that does not compress: start it with --enable-triattention."
            )
        return State(info, replicas, self._metrics() if info.get("enable_metrics") else None)

    def load(self) -> Load:
        """What the server holds and does now; asking costs its scheduler nothing."""
        loads = self._json("/v1/loads?include=core")["loads"]
        requests = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        return Load(sum(load["num_used_tokens"] for load in loads), requests)

    def ids_of(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts before it."""
        sampling = {"max_new_tokens": 1, "temperature": 0, "custom_params": {KEY: {"enabled": False}}}
        body = {"text": text, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        meta = self._json("/generate", body)["meta_info"]
        return [entry[1] for entry in meta["input_token_logprobs"]]

    def ask(self, asks: Sequence[Ask], replica: int | None = None) -> list[Answer]:
        """Sends requests together; `replica` is the data-parallel one that shall serve them, None if there is one."""
        body = {
            "input_ids": [ask.ids for ask in asks],
            "sampling_params": [_sampling(ask) for ask in asks],
            "return_logprob": [True] * len(asks),
            "logprob_start_len": [ask.logprobs_from for ask in asks],
            "top_logprobs_num": [_TOP] * len(asks),
        }
        if replica is not None:
            body["routed_dp_rank"] = replica
        responses = self._json("/generate", body)
        return [_answer(ask, response["meta_info"]) for ask, response in zip(asks, responses, strict=True)]

    def _metrics(self) -> dict[str, float]:
        text = self._read("/metrics/").decode()
        return {name: metric_sum(text, _METRIC.format(name)) for name in COUNTERS}

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return json.loads(self._read(path, body))

    def _read(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What the server answers to a GET, or to a POST of `body`."""
        try:
            with self._connection.open(path, self._timeout, body) as response:
                return response.read()
        except urllib.error.HTTPError as error:
            raise _refusal(f"{self.url}{path}", error.code, error.read()) from None
        except (OSError, HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, TimeoutError):
                raise TriAttentionError(
                    f"{self.url}{path} did not answer within {self._timeout:g} s: see the server's log, or give it "
                    "more time with --timeout."
                ) from None
            shown = first_line(reason) if isinstance(reason, BaseException) else str(reason)
            raise TriAttentionError(
                f"{self.url} does not answer ({shown}): start the server, or correct --url."
            ) from None


class _NotFoundError(TriAttentionError):
    """The server has no such path."""


def metric_sum(text: str, name: str) -> float:
    """Sum of a metric's samples over all labels, in Prometheus's text format; 0 if it has none yet."""
    values = (rest.rpartition("}")[2].split()[0] for rest in _samples(text, name))
    return sum(map(float, values))


def _samples(text: str, name: str) -> list[str]:
    """What follows the name in each of its lines."""
    lines = (line.removeprefix(name) for line in text.splitlines() if line.startswith(name))
    return [line for line in lines if line[:1] in ("{", " ")]


def _sampling(ask: Ask) -> dict[str, Any]:
    return {
        "max_new_tokens": ask.tokens,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": {KEY: ask.control},
    }


def _answer(ask: Ask, meta: dict[str, Any]) -> Answer:
    chosen = meta["output_token_logprobs"]
    return Answer(
        ask=ask,
        output=[entry[1] for entry in chosen],
        logprobs=[entry[0] for entry in chosen],
        others=[{entry[1]: entry[0] for entry in step} for step in meta["output_top_logprobs"]],
        prompt_logprobs=[entry[0] for entry in meta.get("input_token_logprobs") or [] if entry[0] is not None],
        report=meta.get(KEY) or {},
        cached=meta["cached_tokens"],
        retractions=meta.get("num_retractions") or 0,
    )


def _refusal(url: str, status: int, content: bytes) -> TriAttentionError:
    if status in (401, 403):
        return TriAttentionError(f"{url} refuses the API key (status {status}): give the server's with --api-key.")
    if status == 404:
        return _NotFoundError(f"{url} does not exist: give the URL of SGLang's own HTTP server.")
    return TriAttentionError(f"{url} answered with status {status} ({_message(content)}): see the server's log.")


def _message(content: bytes) -> str:
    """The server's own sentence, if it sent one."""
    text = content.decode(errors="replace")
    try:
        error = json.loads(text)
        error = error.get("error", error)
        text = error["message"] if isinstance(error, dict) else str(error)
    except (ValueError, KeyError, AttributeError):
        pass
    return (text.strip().splitlines() or ["no message"])[0][:200].rstrip(". ")
