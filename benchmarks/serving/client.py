"""Requests by SGLang's own benchmark client (`sglang.bench_serving`), and what its clock says about their tokens.

Its request function is used as it is. Its command line is not: it would load a tokenizer and pause for every run, and
it does not say when the tokens of one request came in relation to those of another.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import statistics
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import requests

if TYPE_CHECKING:
    from sglang.benchmark.serving import RequestFuncOutput

OPTIONS = Namespace(
    temperature=0.0,
    top_p=1.0,
    disable_ignore_eos=False,
    disable_stream=False,
    return_logprob=False,
    return_routed_experts=False,
    logprob_start_len=-1,
    top_logprobs_num=0,
    token_ids_logprob=None,
)
FIRST_ID = 1000
"""Prompts consist of ids from here on; special tokens are below, or at the very end of the vocabulary."""


@dataclass(frozen=True)
class Load:
    """Requests that are sent at the same moment.

    Attributes:
        requests: how many.
        prompt: tokens of each prompt; random, and different for each.
        tokens: generated tokens of each.
        compression: what each asks of a compressed server, as in `custom_params["triattention"]`.
    """

    requests: int
    prompt: int
    tokens: int
    compression: dict | None = None

    def prompts(self, vocabulary: int, seed: int) -> list[list[int]]:
        draw = random.Random(seed)
        first = min(FIRST_ID, vocabulary // 4)
        return [[draw.randrange(first, 3 * vocabulary // 4) for _ in range(self.prompt)] for _ in range(self.requests)]


@dataclass(frozen=True)
class Run:
    """When the tokens of a load's requests came, in seconds.

    Attributes:
        starts: when each request was sent.
        tokens: for each request, when each of its tokens came.
        rounds: compaction rounds that the server had meanwhile.
    """

    starts: list[float]
    tokens: list[list[float]]
    rounds: int

    @property
    def gaps(self) -> list[list[float]]:
        """For each request, the times between its tokens; item i is that from token i to token i + 1."""
        return [[later - sooner for sooner, later in itertools.pairwise(times)] for times in self.tokens]

    def steady_gaps(self) -> list[float]:
        """The times between tokens while all requests decode; all, should they never do so together."""
        start, end = max(times[0] for times in self.tokens), min(times[-1] for times in self.tokens)
        pairs = itertools.chain.from_iterable(itertools.pairwise(times) for times in self.tokens)
        return [later - sooner for sooner, later in pairs if start >= end or (sooner >= start and later <= end)]

    def seconds(self) -> float:
        return max(times[-1] for times in self.tokens) - min(self.starts)

    def firsts(self) -> dict[str, float]:
        """Milliseconds to the first token."""
        times = [1e3 * (own[0] - start) for start, own in zip(self.starts, self.tokens, strict=True)]
        return {"ttft_p50_ms": statistics.median(times), "ttft_max_ms": max(times)}


def spread(gaps: list[float]) -> dict[str, float]:
    """Milliseconds between tokens: median, 99th percentile, longest."""
    ordered = sorted(1e3 * gap for gap in gaps)
    return {
        "itl_p50_ms": statistics.median(ordered),
        "itl_p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
        "itl_max_ms": ordered[-1],
    }


def vocabulary_of(model: str) -> int:
    return json.loads((Path(model) / "config.json").read_text())["vocab_size"]


def run(url: str, load: Load, vocabulary: int, seed: int) -> Run:
    """Sends a load to a server whose cache has been flushed.

    Raises:
        SystemExit: a request failed, or ended early.
    """
    requests.post(f"{url}/flush_cache?timeout=60", timeout=120).raise_for_status()
    before = rounds_of(url)
    outputs = asyncio.run(_send(url, load, load.prompts(vocabulary, seed)))
    for output in outputs:
        if not output.success or output.output_len != load.tokens or not output.itl:
            raise SystemExit(f"A request of {load} ended after {output.output_len} tokens. {output.error}")
    return Run([output.start_time for output in outputs], [*map(_times, outputs)], rounds_of(url) - before)


def _times(output: RequestFuncOutput) -> list[float]:
    """When each token came. First tokens without a text of their own, parts of a character, count with the next."""
    silent = output.output_len - 1 - len(output.itl)
    return list(itertools.accumulate([output.start_time + output.ttft, *[0.0] * silent, *output.itl]))


def compression_of(url: str) -> dict[str, Any]:
    """What a server says of its compression, the sums since its start included; empty if it does not compress."""
    state = requests.get(f"{url}/server_info", timeout=60).json()["internal_states"][0]
    return state.get("triattention", {})


def rounds_of(url: str) -> int:
    """Compaction rounds of a server since its start; 0 if it does not compress."""
    return compression_of(url).get("rounds", 0)


async def _send(url: str, load: Load, prompts: list[list[int]]) -> list[RequestFuncOutput]:
    # Takes seconds, which --help need not.
    from sglang.benchmark import serving as client

    client.set_global_args(OPTIONS)
    # Special tokens have text too: the client counts a token when the text is longer.
    sampling = {"max_new_tokens": load.tokens, "temperature": 0, "ignore_eos": True, "skip_special_tokens": False}
    if load.compression is not None:
        sampling["custom_params"] = {"triattention": load.compression}
    body = {"sampling_params": sampling}
    asked = [
        client.RequestFuncInput(ids, f"{url}/generate", len(ids), load.tokens, "", None, None, body) for ids in prompts
    ]
    return await asyncio.gather(*map(client.async_request_sglang_generate, asked))
