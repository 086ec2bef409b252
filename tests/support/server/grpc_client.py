"""Requests by gRPC to a server of `--smg-grpc-mode`, by token ids."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto import sglang_scheduler_pb2 as messages
from smg_grpc_proto import sglang_scheduler_pb2_grpc as service
from smg_grpc_proto.generated import common_pb2 as common

from sglang_triattn.patches.grpc_servicer import METADATA

SERVICE = "sglang.grpc.scheduler.SglangScheduler"
_numbers = itertools.count()


@dataclass(frozen=True)
class Answer:
    """Token ids of an answer, its report, log-probabilities of its tokens, and how many prompt tokens were cached."""

    output_ids: list[int]
    report: dict[str, Any] | None
    logprobs: list[float] = field(default_factory=list)
    cached: int = 0


class GrpcClient:
    """Args: `port` of gRPC, and `metrics`, that of the HTTP server next to it."""

    def __init__(self, port: int, metrics: int) -> None:
        self.port, self.metrics = port, metrics
        self.channel = grpc.insecure_channel(f"127.0.0.1:{port}")
        self.scheduler = service.SglangSchedulerStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def is_serving(self, name: str = SERVICE) -> bool:
        """What gRPC's own health check says of a service, or of the process (an empty name)."""
        try:
            found = self.health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        except grpc.RpcError:
            return False
        return found.status == health_pb2.HealthCheckResponse.SERVING

    def is_healthy(self) -> bool:
        """What SMG's health check says, for which the server generates a token."""
        return self.scheduler.HealthCheck(messages.HealthCheckRequest(), timeout=60).healthy

    def flush(self) -> None:
        """Waits until the server is idle, first."""
        assert self.scheduler.FlushCache(common.FlushCacheRequest(timeout_s=30.0), timeout=60).success

    def wait_until_serving(self, process: Any, seconds: float = 300.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.is_serving():
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline
            time.sleep(0.2)

    def call(
        self,
        ids: Sequence[int],
        tokens: int,
        settings: dict[str, Any] | None = None,
        *,
        stream: bool = False,
        answers: int = 1,
        place: dict[str, Any] | None = None,
    ):
        """A call of Generate: greedy, and past the end-of-text token.

        Args:
            settings: what `custom_params.triattention` holds.
            answers: to the same prompt.
            place: where a decode server finds the prompt's K/V.
        """
        params = messages.SamplingParams(
            temperature=0.0,
            top_p=1.0,
            top_k=-1,
            repetition_penalty=1.0,
            max_new_tokens=tokens,
            ignore_eos=True,
            n=answers,
        )
        if settings is not None:
            params.custom_params.update({"triattention": settings})
        request = messages.GenerateRequest(
            request_id=f"request-{next(_numbers)}",
            tokenized=messages.TokenizedInput(input_ids=ids),
            sampling_params=params,
            return_logprob=True,
            logprob_start_len=-1,
            stream=stream,
            disaggregated_params=None if place is None else messages.DisaggregatedParams(**place),
        )
        return self.scheduler.Generate(request, timeout=300)

    def generate(self, ids: Sequence[int], tokens: int, settings: dict[str, Any] | None = None, **how: Any) -> Answer:
        return answer_of(self.call(ids, tokens, settings, **how))


def answer_of(call: Any) -> Answer:
    """The answer of a call of Generate, once it is finished."""
    parts = list(call)
    (complete,) = [part.complete for part in parts if part.HasField("complete")]
    # In a stream, the last message repeats the last chunk alone.
    chunks = [part.chunk for part in parts if part.HasField("chunk")] or [complete]
    reports = [json.loads(value) for key, value in call.trailing_metadata() if key == METADATA]
    return Answer(
        [token for chunk in chunks for token in (chunk.output_ids if chunk is complete else chunk.token_ids)],
        reports[0] if reports else None,
        [value for chunk in chunks for value in chunk.output_logprobs.token_logprobs],
        complete.cached_tokens,
    )
