"""A random mix of everything that competes for a small pool, for servers of any model."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from harness import Client, assert_pool_is_whole, prompt
from ngram_account import favouring
from tiny_model import END

# A full-length answer that SGLang must expect to end at any time.
WITHOUT_END = {"ignore_eos": False, "logit_bias": {str(END): -1000.0}}
# SGLang's estimate of what answers will need, at its most optimistic, chunks and priorities.
FLAGS = (
    *("--chunked-prefill-size", "96", "--schedule-conservativeness", "0.1"),
    *("--enable-priority-scheduling", "--priority-scheduling-preemption-threshold", "2"),
)
# SGLang's own switch that retracts requests now and then.
RETRACTING = {
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "30",
    "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "5",
}


def ids_alone(ids: list[int], _: random.Random) -> dict[str, Any]:
    """The fields of a request that give its prompt."""
    return {"input_ids": ids}


def storm(
    client: Client,
    seed: int,
    requests: int,
    budgets: tuple[int, int],
    longest: int,
    conversations: int = 0,
    favoured: Sequence[int] = (),
    fields: Callable[[list[int], random.Random], dict[str, Any]] = ids_alone,
) -> tuple[list[dict], list[dict]]:
    """Sends requests from 24 threads and waits for all answers.

    They have shared and private prompts, some longer than a small pool, frozen and compacted; decline compression, ask
    for budgets of their own, are aborted, have priorities.

    Args:
        budgets: least budget that a request may ask for, and the first that is too large.
        longest: tokens of the longest prompts.
        conversations: how many names the requests choose from, on top of none.
        favoured: tokens of which answers that ignore their end consist; empty for any.
        fields: makes those that give a prompt, of its token ids.

    Returns:
        All answers, and those that were not aborted; `asked` is the number of tokens that a request asked for.
    """
    rng = random.Random(seed)
    stems = [prompt(100 + i, 90) for i in range(3)]

    def one(number: int) -> dict:
        ids = rng.choice(stems)[: rng.randrange(90)] + prompt(200 + number, rng.choice([1, 9, 40, 150]))
        asked = rng.choice([{}, {}, {"enabled": False}, {"budget": rng.randrange(*budgets)}, {"prompt": "compact"}])
        if number % 20 == 0:
            ids, asked = ids + prompt(number, longest), {"prompt": "compact"}
        if conversations and asked.get("enabled", True) and rng.random() < 0.5:
            asked = {**asked, "conversation": f"storm-{rng.randrange(conversations)}"}
        tokens = rng.choice([1, 7, 60, 150, 260])
        # SGLang aborts all requests whose ids begin with the given one.
        rid = f"storm-{seed}-{number:03}"
        if rng.random() < 0.2:
            threading.Timer(rng.uniform(0.2, 6), lambda: client.post("/abort_request", rid=rid)).start()
        response = client.post(
            "/generate",
            rid=rid,
            **fields(ids, rng),
            priority=rng.randrange(6),
            sampling_params={
                "max_new_tokens": tokens,
                "temperature": 0.8,
                **(WITHOUT_END if rng.random() < 0.5 else {"ignore_eos": True, **favouring(favoured)}),
                "custom_params": {"triattention": asked},
            },
        )
        return {"asked": tokens, **response.json()}

    with ThreadPoolExecutor(24) as pool:
        results = list(pool.map(one, range(requests)))
    refused = [result for result in results if "meta_info" not in result]
    assert not refused, refused
    ends = [result["meta_info"]["finish_reason"]["type"] for result in results]
    assert set(ends) <= {"length", "abort"}
    finished = [result for result, end in zip(results, ends, strict=True) if end == "length"]
    assert all(result["meta_info"]["completion_tokens"] == result["asked"] for result in finished)
    return results, finished


def retractions(responses: list[dict]) -> int:
    return sum(response["meta_info"]["num_retractions"] for response in responses)


def retractions_logged(client: Client) -> int:
    """How often the server has retracted requests. SGLang retracts one of them most of the time, and forgets how often
    if that is aborted while it waits."""
    log = client.server.log_path.read_text()
    return log.count("Testing retraction. ") + log.count("Retract requests. ")


def assert_withstood(client: Client, finished: list[dict], requests: int) -> None:
    """Holds a server to a storm of so many requests: half of them answered, a round for every third, a retraction, and
    no slot in use."""
    assert len(finished) > requests // 2
    assert retractions(finished) > 0
    assert sum(client.rounds_by_rank()) > requests // 3
    assert_pool_is_whole(client)
