"""Speculative decoding with drafts from the text itself (NGRAM), compressed."""

from __future__ import annotations

import pytest

from family_servers import WITH_BUFFER, WITHOUT_BUFFER, modules_of, prepared, started
from harness import (
    BUDGET,
    INTERVAL,
    KEYS_ALONE,
    RECENT,
    assert_pool_is_whole,
    compression,
    only_models,
    prompt,
    two_cores,
)
from ngram_account import DRAFTED, NGRAM, OVERLAP, PAGES, answer_by_account
from oracle import Oracle, oracle_of
from repeating_model import build_repeating_model, in_circle, outside_circle
from sets import matrix, wide
from storm import FLAGS, RETRACTING, assert_withstood, storm
from tiny_model import TinyModel

# It repeats itself, too. Its own draft layer is not used here.
LATENT = "deepseek-v3-mtp"
# Models with layers that keep a state. Their trees and chains take different ways through SGLang.
STATES = [
    wide("qwen3-next", 1, "overlap off"),
    wide("qwen3-next", 16, "overlap"),
    wide("qwen3.5", 16, "overlap"),
    wide("qwen3.5-whole", 16, "overlap"),
    wide("falcon-h1", 1, "overlap off"),
    wide("granite-4-h", 1, "overlap"),
    wide("nemotron-h", 16, "overlap"),
]


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    return build_repeating_model(tmp_path_factory.mktemp("repeating"))


@pytest.fixture
def drafting(probed, repeating):
    """`drafting(page_size)` returns the Client of a compressing server that drafts, and the steps of its probe."""

    def draft(page_size: int, *flags: str, model: TinyModel = repeating, **served):
        return probed(*NGRAM, *PAGES[page_size], *KEYS_ALONE, *flags, model=model, **served)

    return draft


@pytest.mark.parametrize(("page_size", "schedule"), matrix([1, 16], ["overlap", "overlap off"], strength=1))
def test_logits_and_acceptance(drafting, repeating, page_size, schedule):
    """Prevents wrong positions and masks of drafted tokens after a round, K/V of accepted ones that a round loses, and
    drafts that no longer hold because of it."""
    client, steps = drafting(page_size, *OVERLAP[schedule])
    hold_to_account(client, steps, oracle_of(repeating), page_size, schedule)


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 16])
def test_latents(drafting, tmp_path, page_size):
    """Prevents the same where drafted tokens are latents."""
    tiny, account = prepared(tmp_path, LATENT)
    client, steps = drafting(page_size, model=tiny, env=only_models(*modules_of(LATENT)))
    account.budget, account.interval, account.recent = BUDGET, INTERVAL, RECENT
    hold_to_account(client, steps, account, page_size, "overlap")


@pytest.mark.parametrize(("family", "page_size", "schedule"), STATES)
def test_states(probed, serve, tmp_path, family, page_size, schedule):
    """Prevents the same where layers keep a state, and states that see a token that did not hold, or none of one that
    did."""
    tiny, account = prepared(tmp_path, family, repeating=True)
    buffer = WITH_BUFFER if schedule == "overlap" else WITHOUT_BUFFER
    client, steps = started(probed, tiny, family, *NGRAM, *PAGES[page_size], *KEYS_ALONE, *buffer)
    hold_to_account(client, steps, account, page_size, schedule)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(("family", "page_size"), [("qwen3-next", 1), ("falcon-h1", 16)])
def test_states_on_two_ranks(probed, serve, tmp_path, family, page_size):
    """Prevents the same where each rank has heads, and states, of its own."""
    tiny, account = prepared(tmp_path, family, repeating=True)
    account.selection = "union"
    flags = (*NGRAM, *PAGES[page_size], *KEYS_ALONE, *WITH_BUFFER, "--triattention-selection", "union")
    client, steps = started(probed, tiny, family, *flags, "--tp-size", "2", env=two_cores())
    hold_to_account(client, steps, account, page_size, "overlap")
    serve.stop(client)


def hold_to_account(client, steps, account: Oracle, page_size: int, schedule: str) -> None:
    """Holds an answer that goes round the circle, and how many of its drafts held, to an account."""
    ids = prompt(5, 12) + in_circle(38)
    answer = answer_by_account(client, steps, account, page_size, schedule, ids, 460)
    assert answer.output == in_circle(460, 38)
    assert answer.rounds >= 10

    # All that a step drafts holds, from where the circle has been seen to the end, before and after rounds.
    accepted = [end - start for start, end in answer.runs[:-1] if start > len(ids) + 24]
    assert set(accepted) == {DRAFTED}


@pytest.mark.wide
def test_answers_equal_those_without_drafts(drafting, serve, repeating):
    """Prevents drafts from changing an answer over ten rounds, whether they hold or not."""
    # With overlap, rounds with drafts know of one step less, and come later.
    client, _ = drafting(1, *OVERLAP["overlap off"])
    plain = serve("--page-size", "1", *KEYS_ALONE, model=repeating)
    circle = in_circle(30)
    assert client.generate(circle, 400)["output_ids"] == plain.generate(circle, 400)["output_ids"]
    compared = 0
    for ids in (prompt(6, 40), prompt(7, 21), prompt(9, 33)):
        client.flush()  # it also forgets drafts
        ours, theirs = (each.generate(ids, 430, logit_bias=outside_circle()) for each in (client, plain))
        # Only where no draft holds do rounds come after the same tokens.
        if not ours["meta_info"]["spec_num_correct_drafts"]:
            assert ours["output_ids"] == theirs["output_ids"]
            assert compression(ours) == compression(theirs)
            assert compression(ours)["rounds"] >= 10
            compared += 1
    assert compared


def test_bit_identical_below_the_trigger(drafting, serve, repeating):
    """Prevents compression from changing an answer, a log-probability or an acceptance before it has evicted."""
    client, _ = drafting(1)
    plain = serve(*NGRAM, *PAGES[1], model=repeating, compressed=False)
    for server in (client, plain):
        server.flush()
    for ids in (prompt(1, 60), in_circle(30), prompt(2, 9) + in_circle(20, 7)):
        ours, theirs = (each.generate(ids, BUDGET + INTERVAL, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for name in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
            assert ours["meta_info"][name] == theirs["meta_info"][name], name
        assert ours["output_ids"] == theirs["output_ids"]


@pytest.mark.wide
def test_a_conversation_goes_on(drafting):
    """Prevents a row that is kept with drafted tokens in it, and a turn whose drafts stand at wrong places."""
    client, _ = drafting(16)
    named = {"custom_params": {"triattention": {"conversation": "talk"}}}
    ids = prompt(8, 20) + in_circle(20)
    first = client.generate(ids, 200, **named)
    assert compression(first)["conversation_kept"]
    ids = ids + first["output_ids"] + in_circle(10, 220)
    second = client.generate(ids, 200, **named)
    assert compression(second)["conversation"] == "resumed"
    assert second["output_ids"] == in_circle(200, 230)
    evicted = compression(first)["evicted_tokens"] + compression(second)["evicted_tokens"]
    assert compression(second)["conversation_evicted_tokens"] == evicted > compression(first)["evicted_tokens"]
    assert_pool_is_whole(client)


@pytest.mark.wide
@pytest.mark.parametrize("page_size", PAGES)
def test_storm(serve, repeating, page_size):
    """Prevents reserves that are lost or owned twice where requests are aborted, retracted, resumed and compacted while
    they are prefilled."""
    pool = ("--max-total-tokens", "1024", *FLAGS)
    # Drafts that hold leave few steps to retract in.
    env = {**RETRACTING, "SGLANG_TEST_RETRACT_INTERVAL": "12"}
    client = serve(*NGRAM, *PAGES[page_size], *pool, model=repeating, env=env)
    _, finished = storm(client, 7, 30, (24, BUDGET), 1500, conversations=6)
    assert sum(answer["meta_info"].get("spec_num_correct_drafts", 0) for answer in finished) > 50
    assert_withstood(client, finished, 30)
