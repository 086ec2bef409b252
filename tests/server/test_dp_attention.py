"""Attention data parallelism: each group of ranks has its own requests, and all run each forward pass together."""

from __future__ import annotations

from functools import partial

import pytest

from family_servers import WITH_BUFFER, WITHOUT_BUFFER, compare_with_account, modules_of, prepared, started
from harness import (
    BUDGET,
    KEYS_ALONE,
    REFERENCE,
    STAGES,
    TWO_GROUPS,
    assert_pool_is_whole,
    compression,
    only_models,
    prompt,
    served_logprobs,
    two_cores,
)
from measured_statistics import assert_ranks_measure_as_one
from server import ServerError
from sets import wide
from storm import FLAGS, RETRACTING, retractions, storm
from word_tokenizer import with_tokenizer

FAMILY = "qwen3-moe-all"
GROUPS_OF_TWO = ("--tp-size", "4", "--dp-size", "2", "--enable-dp-attention")
BACKEND = ("--attention-backend", REFERENCE)


CASES = [
    (FAMILY, TWO_GROUPS, 1, "shared-mean"),
    wide(FAMILY, TWO_GROUPS, 16, "per-layer-head"),
    wide("qwen3-moe-wide", GROUPS_OF_TWO, 1, "union"),
    # In pipeline stages.
    wide(FAMILY, (*TWO_GROUPS, *STAGES), 16, "per-layer-head"),
    # With layers that keep a state.
    wide("qwen3-next", (*TWO_GROUPS, *WITH_BUFFER), 16, "per-layer-head"),
    wide("qwen3-next", (*TWO_GROUPS, *WITHOUT_BUFFER), 1, "shared-mean"),
]


@pytest.mark.parametrize(("family", "groups", "page_size", "selection"), CASES)
def test_logits(serve, tmp_path, family, groups, page_size, selection):
    """Prevents heads of another group's batch from being scored, a merge that waits for a group without a round, or
    takes in another group's ranks, and states that see what another group computes."""
    env = two_cores(ranks=4 if groups is GROUPS_OF_TWO or STAGES[0] in groups else 2)
    compare_with_account(serve, tmp_path, family, page_size, selection, *groups, *KEYS_ALONE, env=env)


SMALL_POOL = (*TWO_GROUPS, "--page-size", "16", "--max-total-tokens", "1024", *FLAGS)


@pytest.mark.wide
def test_answers_and_rounds_of_one_group(serve, tmp_path):
    """Prevents answers below the budget from differing from plain SGLang's, and a group without requests that waits for
    rounds of the other."""
    tiny, _ = prepared(tmp_path, FAMILY)
    client = started(serve, tiny, FAMILY, *SMALL_POOL, env={**two_cores(), **RETRACTING})
    modules = only_models(*modules_of(FAMILY))
    plain = serve(*BACKEND, *SMALL_POOL, env={**two_cores(), **RETRACTING, **modules}, model=tiny, compressed=False)
    for seed in (1, 2):
        ours, theirs = (server.generate(prompt(seed, 30), 24, logprobs=True) for server in (client, plain))
        assert compression(ours)["rounds"] == 0
        assert ours["output_ids"] == theirs["output_ids"]
        assert (served_logprobs(ours)[0] == served_logprobs(theirs)[0]).all()
    serve.stop(plain)

    # Group 1 is idle meanwhile.
    sampling = {"max_new_tokens": 150, "temperature": 0, "ignore_eos": True}
    answer = client.post("/generate", input_ids=prompt(3, 30), sampling_params=sampling, routed_dp_rank=0)
    assert compression(answer.json())["rounds"] > 0, answer.text
    assert [rounds > 0 for rounds in sorted(client.rounds_by_rank())] == [False, True]
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "flags", "requests"), [(FAMILY, (), 40), ("qwen3-next", WITH_BUFFER, 30), (FAMILY, STAGES, 30)]
)
def test_storm(serve, tmp_path, family, flags, requests):
    """Prevents leaks in either group's pools, and a group that waits for the other for ever."""
    tiny, account = prepared(tmp_path, family)
    env = {**two_cores(ranks=4 if flags is STAGES else 2), **RETRACTING}
    client = started(serve, tiny, family, *SMALL_POOL, *flags, env=env)
    # Stages have no clock in common by which a named conversation could expire.
    names = 0 if flags is STAGES else 4
    _, finished = storm(client, 1, requests, (48, account.budget), 900, conversations=names)
    assert len(finished) > requests // 2
    assert retractions(finished) > 0
    # SGLang gives requests out by turns, long prompts all to one group.
    assert min(client.rounds_by_rank()) > 0
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.mark.wide
def test_a_model_that_knows_no_groups(serve):
    """Prevents a sentence that blames how heads split over one group, where SGLang splits them over all ranks."""
    with pytest.raises(ServerError, match="with attention data parallelism, SGLang's code of this model splits"):
        serve(*TWO_GROUPS, env=two_cores())


@pytest.mark.wide
@pytest.mark.parametrize("stages", [(), STAGES])
def test_statistics_measured_in_groups(serve, tmp_path, stages):
    """Prevents a first launch that ends, or whose groups measure each their own texts, without a file named."""
    tiny, _ = prepared(tmp_path, FAMILY)
    worded = with_tokenizer(tiny, tmp_path / "worded")
    start = partial(started, serve, worded, FAMILY, tokenizer=True)
    assert_ranks_measure_as_one(start, serve.stop, (*TWO_GROUPS, *stages), BUDGET + 16, tmp_path)
