"""Turns that resume after the compressed row of the previous turn, and what must send them back to the start."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from harness import assert_pool_is_whole, compression, cores_for, prompt, served_logprobs
from oracle import TOLERANCE, oracle_of
from sets import wide


def named(name: str, **fields) -> dict:
    return {"triattention": {"conversation": name, **fields}}


def turn(client, ids, tokens, name, *, logprobs=False, **fields):
    return client.generate(ids, tokens, logprobs=logprobs, custom_params=named(name, **fields))


def follow(ids: list[int], response: dict, seed: int, length: int = 12) -> list[int]:
    """The next turn's prompt: the conversation so far and a new message."""
    return ids + response["output_ids"] + prompt(seed, length)


@pytest.mark.parametrize(
    "flags",
    [
        wide(("--page-size", "1", "--triattention-selection", "shared-mean", "--triattention-turn-inputs", "compact")),
        ("--page-size", "16", "--triattention-turn-inputs", "compact"),
        wide(("--page-size", "1", "--tp-size", "2", "--triattention-turn-inputs", "compact")),
    ],
    ids=["page 1, shared-mean", "page 16", "two ranks"],
)
def test_resumed_turns_equal_one_long_request(serve, tiny, flags):
    """Prevents wrong positions, kept sets or tokens after a parked row: a turn must resume as if never ended."""
    client = serve(*flags, env=cores_for(flags))
    oracle = oracle_of(tiny)
    oracle.selection = "shared-mean" if "shared-mean" in flags else "per-layer-head"
    ids = prompt(31, 48)
    first = turn(client, ids, 150, f"long {flags}", logprobs=True)
    assert (compression(first)["conversation"], compression(first)["conversation_kept"]) == ("new", True)
    following = follow(ids, first, 32)
    second = turn(client, following, 150, f"long {flags}", logprobs=True)
    report = compression(second)
    assert (report["conversation"], report["conversation_kept"]) == ("resumed", True)
    assert (report["frozen_length"], report["protected_length"]) == (48, 0)
    # Only the message and the last sampled token, which has no K/V yet, are computed.
    assert second["meta_info"]["cached_tokens"] == len(ids) + 149
    assert second["meta_info"]["prompt_tokens"] == len(following)
    # The message is prefilled in one piece, and rounds wait until that is done.
    expected, _ = oracle.logprobs(
        following + second["output_ids"][:-1], 48, 48, pauses=[(len(ids) + 149, len(following) + 1)]
    )
    values, tokens = served_logprobs(second)
    tail = expected[len(following) - 48 :]
    assert (tail.gather(1, tokens) - values).abs().max() < TOLERANCE
    turn(client, prompt(33, 5), 1, f"long {flags}", release=True)
    assert_pool_is_whole(client)


def test_each_turn_reports_what_it_did(serve):
    """Prevents tokens that count in every later turn while slots do not, so that sums are too large."""
    client = serve("--page-size", "1")
    before, ids, reports = client.totals(), prompt(35, 40), []
    for number in range(3):
        response = turn(client, ids, 150, "counted")
        reports.append(compression(response))
        ids = follow(ids, response, 36 + number)
    assert [report["conversation"] for report in reports] == ["new", "resumed", "resumed"]
    after = client.totals()
    for name in ("rounds", "evicted_tokens", "freed_slots"):
        assert after[name] - before[name] == sum(report[name] for report in reports)
    lost = 0
    for report in reports:
        assert report["evicted_tokens"] == report["freed_slots"] > 0
        lost += report["evicted_tokens"]
        assert report["conversation_evicted_tokens"] == lost
        assert report["logical_length"] - report["physical_length"] == lost
    alone = compression(client.generate(prompt(39, 40), 150))
    assert "conversation_evicted_tokens" not in alone
    turn(client, prompt(33, 5), 1, "counted", release=True)
    assert_pool_is_whole(client)


def cold_answer(client, ids, tokens):
    """The response to a request that names no conversation, with nothing cached."""
    client.flush()
    return client.generate(ids, tokens, logprobs=True)


def assert_same_start(one: dict, other: dict, count: int) -> None:
    """Asserts that the first `count` tokens agree: until then neither request has evicted anything."""
    for a, b in zip(
        one["meta_info"]["output_token_logprobs"][:count],
        other["meta_info"]["output_token_logprobs"][:count],
        strict=True,
    ):
        assert a[1] == b[1]
        assert a[0] == pytest.approx(b[0], abs=1e-3)


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_everything_else_starts_afresh(serve, page_size):
    """Prevents a turn from resuming after other text: different ids, another client's row, a released row."""
    client = serve("--page-size", str(page_size))
    ids = prompt(41, 40)
    first = turn(client, ids, 150, "a")
    following = follow(ids, first, 42)
    other = [*following[:60], 7, *following[61:]]
    diverged = turn(client, other, 20, "a", logprobs=True)
    assert compression(diverged)["conversation"] == "diverged"
    again = turn(client, following, 20, "a", logprobs=True)
    assert compression(again)["conversation"] == "lost"
    elsewhere = turn(client, following, 20, "b", logprobs=True)
    assert compression(elsewhere)["conversation"] == "new"
    client.flush()
    assert_same_start(diverged, cold_answer(client, other, 20), 20)
    cold = cold_answer(client, following, 20)
    assert_same_start(again, cold, 20)
    assert_same_start(elsewhere, cold, 20)

    kept = turn(client, ids, 150, "c")
    released = turn(client, follow(ids, kept, 43), 150, "c", release=True)
    assert (compression(released)["conversation"], compression(released)["conversation_kept"]) == ("resumed", False)
    after = turn(client, follow(follow(ids, kept, 43), released, 44), 5, "c")
    assert compression(after)["conversation"] == "new"
    assert_pool_is_whole(client)


def test_two_clients_with_one_name(serve):
    """Prevents two simultaneous turns from sharing a row: one goes on with it, the other with a copy."""
    client = serve("--page-size", "16")
    ids = prompt(51, 40)
    first = turn(client, ids, 150, "shared")
    turns = [follow(ids, first, 52), follow(ids, first, 53)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda ids: turn(client, ids, 150, "shared", logprobs=True), turns))
    for number, (ids, answer) in enumerate(zip(turns, answers, strict=True)):
        assert compression(answer)["conversation"] == "resumed"
        alone = client.generate(turns[0][:40], 150, custom_params=named(f"alone {number}"))
        assert alone["output_ids"] == first["output_ids"]
        expected = turn(client, ids, 150, f"alone {number}", logprobs=True)
        assert compression(expected)["conversation"] == "resumed"
        assert_same_start(answer, expected, 150)
    client.flush()
    assert_pool_is_whole(client)


def test_conversations_give_way(serve):
    """Prevents idle rows from starving requests of memory or rows, and from outliving a flush or their time."""
    client = serve(
        *("--page-size", "1", "--max-total-tokens", "1024", "--max-running-requests", "8"),
        *("--triattention-conversation-ttl", "12"),
    )
    with ThreadPoolExecutor(8) as pool:
        turns = list(pool.map(lambda n: turn(client, prompt(60 + n, 30), 110, f"idle {n}"), range(30)))
    assert all(compression(response)["conversation_kept"] for response in turns)
    held = client.slots_in_use()
    assert 300 < held <= 1024
    # More than is left, so the oldest rows go.
    large = client.generate(prompt(99, 600), 200)
    assert large["meta_info"]["completion_tokens"] == 200
    client.wait_for_slots(held - 1)
    # The clock is the server's, and 30 turns must fit into a conversation's lifetime.
    time.sleep(12.5)
    turn(client, prompt(98, 5), 1, "newcomer")
    client.wait_for_slots()
    assert_pool_is_whole(client)


def test_only_a_granted_flush_takes_rows(serve):
    """Prevents a flush that SGLang refuses from taking a conversation's row, and a granted one from leaving it."""
    client = serve("--page-size", "1")
    ids = prompt(81, 40)
    first = turn(client, ids, 150, "flushed")
    before = client.totals()["rounds"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate, prompt(82, 20), 900)
        while client.totals()["rounds"] == before and not running.done():
            time.sleep(0.02)
        refused = client.post("/flush_cache")
        assert not running.done(), "the request ended before the flush, so that nothing was tested"
        assert refused.status_code == 400
        client.post("/abort_request", abort_all=True)
        running.result()
    following = follow(ids, first, 83)
    second = turn(client, following, 150, "flushed")
    assert compression(second)["conversation"] == "resumed"
    assert client.slots_in_use() > 0
    assert_pool_is_whole(client)
    third = turn(client, follow(following, second, 84), 150, "flushed", logprobs=True)
    assert (compression(third)["conversation"], third["meta_info"]["cached_tokens"]) == ("lost", 0)
    assert_pool_is_whole(client)


def test_hundreds_of_abandoned_conversations(serve):
    """Prevents a leak of a few slots or rows for each abandoned conversation."""
    client = serve("--page-size", "16")

    def abandon(number: int) -> str:
        params = named(f"abandoned {number}", budget=8, interval=4, recent=2)
        response = client.generate(prompt(number, 9), 20, custom_params=params)
        return compression(response)["conversation"]

    with ThreadPoolExecutor(96) as pool:
        assert set(pool.map(abandon, range(200))) == {"new"}
    assert_pool_is_whole(client)


def test_exact_start_of_an_answer_is_shared(serve):
    """Prevents exact K/V before the first hole from being thrown away, and any after it from being shared."""
    client = serve("--page-size", "1")
    ids = prompt(71, 40)
    # At least the first tokens of a compacted prompt stay; they are computed and stored as if nothing had happened.
    response = client.generate(ids, 100, custom_params={"triattention": {"prompt": "compact"}})
    assert compression(response)["rounds"] > 0
    following = follow(ids, response, 72)
    warm = client.generate(following, 20, logprobs=True)
    assert 4 <= warm["meta_info"]["cached_tokens"] < 40
    assert_same_start(warm, cold_answer(client, following, 20), 20)
