"""The KV tier in host memory and its storage: prompts go there and come back, with rounds or without.

`meta_info["cached_tokens_details"]` reports which tier each cached token of a prompt came from.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle

import pytest

from draft_heads import build_eagle
from draft_pairs import KEEP_STATES, MODES, Pair, Pairs, drafts_with_account, weather_storm
from draft_trees import TreePair
from family_servers import WITH_BUFFER, WITHOUT_BUFFER, prepared, started
from harness import (
    BUDGET,
    DRAFTS,
    INTERVAL,
    KEYS_ALONE,
    STAGES,
    Client,
    assert_pool_is_whole,
    compression,
    cores_for,
    prompt,
    served_logprobs,
)
from host_tier import FEW_STATES, HOST_TIER, RESERVE, fill_the_pool, hits
from ngram_account import NGRAM, PAGES, answer_by_account
from oracle import TOLERANCE, oracle_of
from repeating_model import build_repeating_model, in_circle
from sets import wide
from storm import FLAGS, RETRACTING

# Tokens of which an answer consists, so that drafts of it hold.
FEW = (10, 11, 12)
# Page size, when the tree's nodes are copied to the host (at once, or when they are evicted), layout on the host.
WAYS = {
    "write_through": ("--page-size", "1", "--hicache-mem-layout", "layer_first"),
    "write_back": ("--page-size", "16"),
}

WRITE_BACK = ("--hicache-write-policy", "write_back")
# A storage to which host memory only passes copies on.
STORED = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
PASSING = ("--hicache-host-memory-mode", "buffer_only", *STORED)


@pytest.fixture
def tiered(serve, request) -> Client:
    """A server whose host tier holds four times as many tokens as its small KV pool; both start empty."""
    way = ("--hicache-write-policy", request.param, "--hicache-ratio", "4", *WAYS[request.param])
    client = serve(*HOST_TIER, *way, env=RESERVE)
    client.flush()
    return client


def by_default(way: str):
    """Runs a test of `tiered` for all of WAYS, of which all but this one are wide."""
    return pytest.mark.parametrize("tiered", [each if each == way else wide(each) for each in WAYS], indirect=True)


def assert_same_answer(one: dict, other: dict) -> None:
    assert one["output_ids"] == other["output_ids"]
    pairs = zip(one["meta_info"]["output_top_logprobs"], other["meta_info"]["output_top_logprobs"], strict=True)
    for these, those in pairs:
        assert [entry[0] for entry in these] == pytest.approx([entry[0] for entry in those], abs=2e-3)


def ask_in_turn(client: Client, texts: list[list[int]], until: list[Future]) -> list[tuple[int, dict]]:
    """(index of the text, response), cycling through the texts for as long as the futures run."""
    answers = []
    for index in cycle(range(len(texts))):
        response = client.generate(texts[index], 8, logprobs=True)
        if any(future.done() for future in until):
            return answers
        answers.append((index, response))


@by_default("write_back")
def test_prompts_return_from_the_host_during_rounds(tiered):
    """Prevents prompts that left the KV pool from coming back altered, or over the rows of compressed requests.

    Five prompts, more than the pool holds, are requested in turn while two requests go through rounds all the time.
    """
    texts = [prompt(300 + i, 280) for i in range(5)]
    others = [prompt(310 + i, 40) for i in range(2)]
    alone = [tiered.generate(ids, 400)["output_ids"] for ids in others]
    tiered.flush()
    cold = [tiered.generate(ids, 8, logprobs=True) for ids in texts]
    assert not any(response["meta_info"]["cached_tokens"] for response in cold)

    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(tiered.generate, ids, 400) for ids in others]
        answers = ask_in_turn(tiered, texts, running)
    returned = [response for _, response in answers if hits(response)["host"] > 256]
    assert len(returned) >= 5
    for index, response in answers:
        assert_same_answer(response, cold[index])
    for future, ids, expected in zip(running, others, alone, strict=True):
        report = compression(future.result())
        assert report["rounds"] >= (400 - BUDGET - INTERVAL) // INTERVAL
        assert report["physical_length"] <= len(ids) + BUDGET + INTERVAL
        assert future.result()["output_ids"] == expected
    tiered.flush()
    assert tiered.slots_in_use() == 0


@by_default("write_through")
def test_generated_tokens_reach_no_tier(tiered):
    """Prevents K/V with holes, or computed after an eviction, from being kept for later requests in either tier."""
    for seed, tier in ((320, "device"), (330, "host")):
        ids = prompt(seed, 48)
        first = tiered.generate(ids, 300)
        assert compression(first)["rounds"] > 0
        turn = ids + first["output_ids"] + prompt(seed + 1, 20)
        if tier == "host":
            fill_the_pool(tiered, seed + 2)
        warm = tiered.generate(turn, 8, logprobs=True)
        # The prompt and, of the answer, at most what lies before the first hole.
        assert 48 <= hits(warm)[tier] < 48 + 16
        assert hits(warm) == {"device": 0, "host": 0, "storage": 0, tier: hits(warm)[tier]}
        tiered.flush()
        cold = tiered.generate(turn, 8, logprobs=True)
        assert cold["meta_info"]["cached_tokens"] == 0
        assert_same_answer(warm, cold)


@by_default("write_back")
def test_full_pool_with_the_host_tier(tiered):
    """Prevents slots from being lost and requests from being retracted when more wait than the pool can hold."""
    responses = tiered.generate_all([prompt(340 + i, 64) for i in range(12)], 150)
    assert sum(response["meta_info"]["num_retractions"] for response in responses) == 0
    for response in responses:
        report = compression(response)
        assert response["meta_info"]["completion_tokens"] == 150
        assert report["frozen_length"] <= 64
        assert report["physical_length"] <= 64 + BUDGET + INTERVAL
    tiered.flush()
    tiered.assert_alive()
    assert tiered.slots_in_use() == 0


@pytest.mark.parametrize("flags", [STORED, wide(PASSING)])
def test_storage_holds_prompts_alone(serve, tmp_path_factory, flags):
    """Prevents compacted K/V from outliving the server in a storage that other servers read."""
    folder = tmp_path_factory.mktemp("storage")
    client = serve(
        *HOST_TIER,
        *("--page-size", "16"),
        *flags,
        env={**RESERVE, "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)},
    )
    ids = prompt(360, 320)
    first = client.generate(ids, 300)
    assert compression(first)["rounds"] > 0
    # Pages are stored in order: once the later prompt's are there, none of the first are still to come.
    client.generate(prompt(361, 32), 1)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < (320 + 32) // 16 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(list(folder.iterdir())) == (320 + 32) // 16

    turn = ids + first["output_ids"] + prompt(362, 20)
    client.flush()
    warm = client.generate(turn, 8, logprobs=True)
    assert hits(warm) == {"device": 0, "host": 0, "storage": 320}
    for page in folder.iterdir():
        page.unlink()
    client.flush()
    cold = client.generate(turn, 8, logprobs=True)
    assert cold["meta_info"]["cached_tokens"] == 0
    assert_same_answer(warm, cold)


OTHER_POOLS = [
    wide("deepseek-v3", WAYS["write_back"]),
    wide("deepseek-v3", (*WRITE_BACK, *WAYS["write_through"])),
    wide("gpt-oss", WAYS["write_back"]),
    wide("gpt-oss", (*WRITE_BACK, *WAYS["write_through"])),
    wide("qwen3-next", (*WITH_BUFFER, *FEW_STATES, *WAYS["write_back"])),
    wide("falcon-h1", (*WRITE_BACK, *WITHOUT_BUFFER, *FEW_STATES, "--page-size", "1")),
    wide("gpt-oss", (*STAGES, *WAYS["write_back"])),
    wide("llama", (*PASSING, *KEYS_ALONE, *WAYS["write_back"])),
    wide("gpt-oss", (*PASSING, *WAYS["write_back"])),
    wide("qwen3-next", (*PASSING, *WITH_BUFFER, *FEW_STATES, *WAYS["write_back"])),
    wide("llama", (*STAGES, *KEYS_ALONE, *WAYS["write_back"])),
    wide("llama", (*STAGES, *KEYS_ALONE, *WRITE_BACK, *WAYS["write_through"])),
]


@pytest.mark.parametrize(("family", "flags"), OTHER_POOLS)
def test_other_pools_return_from_the_host(serve, tmp_path, family, flags):
    """Prevents latents, a window's K/V or states from coming back altered or over the rows of compressed requests, and
    rounds that score or evict what has come back, in one pipeline stage or in each of two.

    Prompts that share stems, more than the pool holds, are requested in turn while two requests go through rounds.
    """
    tiny, account = prepared(tmp_path, family)
    account.value_share = 0.0 if KEYS_ALONE[0] in flags else account.value_share
    storage, tier = tmp_path / "storage", "storage" if "buffer_only" in flags else "host"
    env = {**RESERVE, **cores_for(flags), "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(storage)}
    client = started(serve, tiny, family, *HOST_TIER, "--hicache-ratio", "4", *flags, env=env)
    stems = [prompt(300 + i, 256) for i in range(5)]
    texts = [stem + prompt(400 + i, 20) for i, stem in enumerate(stems)]
    cold = [client.generate(ids, 8, logprobs=True) for ids in texts]
    client.flush()
    for stem in stems:
        assert client.generate(stem, 1)["meta_info"]["cached_tokens"] == 0
    others = [prompt(310 + i, 40) for i in range(2)]
    with ThreadPoolExecutor(2) as pool:
        running = [pool.submit(client.generate, ids, 300, logprobs=True) for ids in others]
        answers = ask_in_turn(client, texts, running)
    assert len([response for _, response in answers if hits(response)[tier] >= 192]) >= 5
    for index, response in answers:
        assert_same_answer(response, cold[index])

    # One prompt is in the tier now, and its request goes on for several rounds.
    fill_the_pool(client, 340)
    last = client.generate(texts[0], 300, logprobs=True)
    assert hits(last)[tier] >= 192
    for ids, response in zip([*others, texts[0]], [*(future.result() for future in running), last], strict=True):
        report = compression(response)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = account.logprobs(everything, len(ids), report["frozen_length"])
        assert report["rounds"] == rounds >= 4
        values, top = served_logprobs(response)
        assert (expected.gather(1, top) - values).abs().max() < TOLERANCE
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize("flags", [WAYS["write_back"], (*WRITE_BACK, *WAYS["write_through"])])
def test_drafts_return_from_the_host(serve, tiny, flags):
    """Prevents K/V of a draft model from staying on the host, or from coming back for other tokens: it would draft
    other tokens than for the same prompt when that was new."""
    drafts = ("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(tiny.path), *DRAFTS)
    client = serve(*drafts, *HOST_TIER, "--hicache-ratio", "4", *flags, *KEYS_ALONE, env=RESERVE)
    texts = [prompt(300 + i, 280) for i in range(4)]
    client.flush()
    cold = [client.generate(ids, 200, logprobs=True) for ids in texts]
    for ids, new in zip(texts, cold, strict=True):
        again = client.generate(ids, 200, logprobs=True)
        assert hits(again)["host"] >= 256
        assert compression(again)["rounds"] == compression(new)["rounds"] >= 3
        assert_same_answer(again, new)
        drafted, before = (each["meta_info"]["spec_num_correct_drafts"] for each in (again, new))
        # Before its first round a model that drafts for itself is always right.
        assert drafted == before > 3 * BUDGET // 4
    assert_pool_is_whole(client)
    serve.stop(client)


def hold_drafts_to_account(
    client: Client, steps: Callable[[], list[dict]], pair: Pair, mode: str, earlier: list[int], ids: list[int]
) -> None:
    """Holds an answer to `ids`, and the drafts of it, to their account, once what they share with `earlier` has come
    back from the host."""
    client.generate(earlier, 1)
    fill_the_pool(client, 340)
    steps()
    answer = client.generate(ids, 300, logprobs=True)
    assert hits(answer)["host"] >= 192
    found = drafts_with_account(pair, mode, ids, answer, steps(), len(ids) - len(ids) % client.setting("page_size"))
    assert compression(answer)["rounds"] >= 6
    assert len(found) > 40
    assert sum(found) > 0
    assert_pool_is_whole(client)


@pytest.mark.wide
@pytest.mark.parametrize(("mode", "policy"), [("pages", "write_through"), ("moved", "write_back")])
def test_trees_of_drafts_after_a_prompt_from_the_host(serve, probed, tmp_path, mode, policy):
    """Prevents K/V of a prompt, or of its draft model, from coming back over the slots of branches, and trees that are
    drafted from K/V of other tokens: each is that of an account."""
    target = build_repeating_model(tmp_path)
    pair = TreePair("EAGLE", target, oracle_of(target), build_eagle(tmp_path, target, third=False, noise=0.9))
    tier = (*HOST_TIER, "--hicache-ratio", "4", "--hicache-write-policy", policy)
    client, steps = probed(*pair.args, *MODES[mode], *tier, *KEYS_ALONE, model=target, env={**pair.env, **RESERVE})
    ids = prompt(5, 218) + in_circle(38)
    hold_drafts_to_account(client, steps, pair, mode, [*ids, 5], ids)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "page_size", "flags"),
    [
        ("gpt-oss", 16, ()),
        ("olmo3", 1, ()),
        ("qwen3-next", 16, (*WITH_BUFFER, *FEW_STATES)),
        ("falcon-h1", 1, (*WITH_BUFFER, *FEW_STATES)),
    ],
)
def test_prompts_of_drafting_requests_return_from_the_host(serve, probed, tmp_path, family, page_size, flags):
    """Prevents a window's K/V or states from coming back over slots for drafts, and drafts that are verified at wrong
    places after a prompt that has come back."""
    tiny, account = prepared(tmp_path, family)
    flags = (*NGRAM, *PAGES[page_size], *KEYS_ALONE, *HOST_TIER, "--hicache-ratio", "4", *flags)
    client, steps = started(probed, tiny, family, *flags, env=RESERVE)
    stem = prompt(300, 256)
    client.generate(stem, 1)
    fill_the_pool(client, 340)
    ids = stem + prompt(301, 16)
    answer = answer_by_account(client, steps, account, page_size, "overlap", ids, 300, FEW, flush=False)
    assert hits(answer.response)["host"] >= 192
    assert answer.rounds >= 4
    assert max(answer.accepted) > 1
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode", "policy"),
    [
        ("NEXTN states", "moved", "write_back"),
        ("NEXTN axes", "pages", "write_through"),
        ("EAGLE layers windows", "pages", "write_through"),
        ("DFLASH", "moved", "write_back"),
        ("EAGLE3 windows", "moved", "write_back"),
    ],
)
def test_drafts_after_a_prompt_from_the_host(probed, tiny, tmp_path, name, mode, policy):
    """Prevents K/V of draft layers, a window's or states from coming back altered, or over slots for drafts, and drafts
    from K/V of other tokens: each is that of an account."""
    pair = Pairs(tiny, build_repeating_model(tmp_path), tmp_path)[name]
    few = FEW_STATES if name in KEEP_STATES else ()
    tier = (*HOST_TIER, "--hicache-ratio", "4", "--hicache-write-policy", policy, *few)
    flags = (*pair.args, *MODES[mode], *pair.settings, *tier, *KEYS_ALONE)
    client, steps = probed(*flags, model=pair.target, env={**pair.env, **RESERVE})
    stem = prompt(5, 218) + in_circle(38)
    hold_drafts_to_account(client, steps, pair, mode, stem, stem + in_circle(10, 38))


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mode"), [("NEXTN states", "pages"), ("EAGLE layers windows", "moved")])
def test_storm_of_drafts(serve, tiny, tmp_path, name, mode):
    """Prevents slots, copies or states that are lost or owned twice where requests that draft are aborted, retracted,
    resumed and compacted while prompts go to the host and come back."""
    pair = Pairs(tiny, tiny, tmp_path)[name]
    flags = (*pair.args, *MODES[mode], *pair.settings, *HOST_TIER, "--hicache-ratio", "4", *FLAGS)
    client = serve(*flags, model=pair.target, env={**pair.env, **RETRACTING})
    weather_storm(client, pair)
    serve.stop(client)
