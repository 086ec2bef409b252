"""Models with layers that keep a state instead of KV, on two ranks, in turns, below the budget and in a storm;
`test_families` has one rank."""

from __future__ import annotations

import pytest

from family_servers import WITH_BUFFER, WITH_LAZY_BUFFER, WITHOUT_BUFFER, compare_with_account, prepared, started
from harness import (
    DRAFTS,
    KEYS_ALONE,
    TWO_GROUPS,
    Client,
    assert_pool_is_whole,
    compression,
    cores_for,
    greedy,
    prompt,
    served_logprobs,
    two_cores,
)
from measured_statistics import assert_measured_right, measuring
from ngram_account import NGRAM, PAGES
from oracle import TOLERANCE
from sets import wide
from storm import FLAGS, RETRACTING, WITHOUT_END, assert_withstood, retractions, storm

# The tree keeps states of prompts in a pool of its own, as int8.
INT8 = ("--enable-int8-mamba-checkpoint",)
CASES = [
    wide("qwen3-next", "shared-mean", WITH_BUFFER),
    wide("falcon-h1", "union", (*WITHOUT_BUFFER, *KEYS_ALONE)),
]


@pytest.mark.parametrize(("family", "selection", "flags"), CASES)
def test_logits_on_two_ranks(serve, tmp_path, family, selection, flags):
    """Prevents states that a round changes or that see a token twice, and KV of the wrong layers from being scored,
    where ranks have some heads each."""
    compare_with_account(serve, tmp_path, family, 1, selection, "--tp-size", "2", *flags, env=two_cores())


@pytest.mark.parametrize(
    "flags", [wide(WITHOUT_BUFFER), WITH_BUFFER, wide(WITH_LAZY_BUFFER), wide((*WITHOUT_BUFFER, *INT8))]
)
def test_turn_that_resumes_and_prompt_that_is_compacted(serve, tmp_path, flags):
    """Prevents a turn from going on with a state that has seen more or fewer tokens than the row that it resumes, and
    the tree from keeping a state under the length of a shortened row."""
    tiny, account = prepared(tmp_path, "qwen3-next")
    account.selection = "shared-mean"
    more = ("--triattention-selection", "shared-mean", "--chunked-prefill-size", "96")
    client = started(serve, tiny, "qwen3-next", *more, *flags)

    def worst(ids, response, prompt_length, frozen, **how):
        expected, rounds = account.logprobs(ids + response["output_ids"][:-1], prompt_length, frozen, **how)
        values, tokens = served_logprobs(response)
        return (expected[-len(tokens) :].gather(1, tokens) - values).abs().max(), rounds

    ids = prompt(31, 48)
    named = {"triattention": {"conversation": "long", "turn_inputs": "compact"}}
    answer = client.generate(ids, 250, **WITHOUT_END)["output_ids"]
    # One that ends at a token that was not foreseen: with overlap, the next step has begun by then.
    end = next(place for place in range(200, 250) if answer[place] not in answer[:place])
    first = client.generate(ids, 250, custom_params=named, stop_token_ids=[answer[end]], **WITHOUT_END)
    assert (first["output_ids"], compression(first)["conversation_kept"]) == (answer[: end + 1], True)
    following = ids + first["output_ids"] + prompt(32, 40)
    second = client.generate(following, 250, logprobs=True, custom_params=named)
    assert compression(second)["conversation"] == "resumed"
    # The message is prefilled in one piece, and rounds wait until that is done.
    error, rounds = worst(following, second, 48, 48, pauses=[(len(ids) + end, len(following) + 1)])
    assert rounds >= 10
    assert error < TOLERANCE

    whole = prompt(62, 500)
    response = client.generate(whole, 120, logprobs=True, custom_params={"triattention": {"prompt": "compact"}})
    error, rounds = worst(whole, response, len(whole), 4, chunk=96)
    assert compression(response)["rounds"] == rounds >= 6
    assert error < TOLERANCE
    # No part of a compacted row is in the tree.
    again = client.generate(whole, 1)
    assert again["meta_info"]["cached_tokens"] == 0
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {"conversation": "long", "release": True}})
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.parametrize(
    ("family", "flags", "requests"),
    [
        wide("qwen3-next", WITHOUT_BUFFER, 30),
        ("qwen3-next", (*WITH_BUFFER, "--page-size", "16"), 20),
        wide("qwen3-next", (*WITH_LAZY_BUFFER, "--page-size", "16"), 30),
        wide("qwen3-next", (*WITHOUT_BUFFER, *NGRAM), 30),
        wide("qwen3-next", (*WITH_BUFFER, *NGRAM, *PAGES[16]), 30),
        wide("falcon-h1", (*WITH_BUFFER, *NGRAM, *PAGES[16]), 30),
        wide("qwen3-next-mtp", (*WITH_BUFFER, "--page-size", "16", "--speculative-algorithm", "NEXTN", *DRAFTS), 30),
        wide("falcon-h1", (*WITH_BUFFER, "--page-size", "16"), 30),
        wide("falcon-h1", (*WITHOUT_BUFFER, *INT8), 30),
        wide("qwen3-next", (*WITH_BUFFER, *INT8, "--page-size", "16"), 30),
    ],
)
def test_answers_and_storm(serve, tmp_path, family, flags, requests):
    """Prevents answers below the budget, or prefix hits, from differing from plain SGLang's, and leaks of slots, rows
    or states. With drafts: a row kept for a turn, whose state has seen more than the row has."""
    flags, drafts = (*flags, "--max-total-tokens", "1536", *FLAGS), "--speculative-algorithm" in flags
    tiny, account = prepared(tmp_path, family, repeating="NGRAM" in flags)
    client = started(serve, tiny, family, *flags, env=RETRACTING)
    plain = started(serve, tiny, family, *flags, env=RETRACTING, compressed=False)
    stem = prompt(1, 128)
    for ids in (stem, stem + prompt(2, 30), stem + prompt(3, 9)):
        ours, theirs = (server.generate(ids, account.budget, logprobs=True) for server in (client, plain))
        assert compression(ours)["rounds"] == 0
        counts = ("spec_num_correct_drafts",) if drafts else ()
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", *counts):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    assert ours["meta_info"]["cached_tokens"] == 128
    serve.stop(plain)
    # Off by 0.002 at most with states in eight bits.
    assert_prompts_are_found_right(client, 0.01 if set(INT8) <= set(flags) else TOLERANCE)

    budgets, names = (account.recent + 1, account.budget), 0 if drafts else 4
    _, finished = storm(client, 1, requests, budgets, 1500, conversations=names)
    assert_withstood(client, finished, requests)
    if drafts:
        assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in finished) > 50
        assert_conversations_are_refused(client)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    "drafts",
    [
        NGRAM,
        ("--speculative-algorithm", "NEXTN", *DRAFTS),
        ("--speculative-algorithm", "NEXTN", *DRAFTS, *TWO_GROUPS),
    ],
    ids=["NGRAM", "NEXTN", "groups"],
)
def test_a_launch_that_drafts_measures_right(serve, tmp_path, drafts):
    """Prevents statistics of other layers than those that are scored, or none, where tokens are drafted."""
    tiny, account = prepared(tmp_path, "qwen3-next-mtp")
    env = {**measuring(tmp_path, absorbs=False), **cores_for(drafts)}
    client = started(serve, tiny, "qwen3-next-mtp", *WITH_BUFFER, *drafts, "--triattention-stats", "auto", env=env)
    assert_measured_right(client, tiny, account, "qwen3-next", tmp_path)
    serve.stop(client)


def assert_prompts_are_found_right(client: Client, tolerance: float) -> None:
    """Prevents the tree from keeping, under a prompt, the state of a retracted request that was computed again with
    what it had answered."""
    prompts = [prompt(70 + i, 150) for i in range(9)]
    assert retractions(client.generate_all(prompts, 150)) > 1
    longer = [ids + prompt(7, 5) for ids in prompts]
    found = client.generate_all(longer, 2, logprobs=True)
    assert max(answer["meta_info"]["cached_tokens"] for answer in found) >= 128
    client.flush()
    for one, other in zip(found, client.generate_all(longer, 2, logprobs=True), strict=True):
        (ours, tokens), (theirs, same) = served_logprobs(one), served_logprobs(other)
        assert other["meta_info"]["cached_tokens"] == 0
        assert (tokens == same).all()
        assert (ours - theirs).abs().max() < tolerance


def assert_conversations_are_refused(client: Client) -> None:
    sampling = greedy(4, custom_params={"triattention": {"conversation": "a"}})
    refused = client.post("/generate", input_ids=prompt(4, 9), sampling_params=sampling)
    assert refused.status_code == 400
    assert "for a model whose layers keep a state, which queued steps move beyond the row" in refused.text
