"""A decode server with a tree of its own, with replicas, or with adapters."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from disaggregated_servers import (
    RETRACT,
    TREE,
    Retractions,
    assert_account,
    hold_to_account,
    running_separated,
    storm,
)
from harness import BUDGET, INTERVAL, KEYS_ALONE, assert_pool_is_whole, prompt, python_path, two_cores
from lora_adapter import build_adapter, install_unpinned, merge, serving
from oracle import oracle_of

HOST = (*TREE, "--enable-hierarchical-cache", "--hicache-ratio", "4", "--hicache-write-policy", "write_through")
POOL = ("--max-total-tokens", "2048")


@pytest.fixture
def account(tiny):
    """The account of a server that chooses by keys alone."""
    return replace(oracle_of(tiny), value_share=0.0)


@pytest.mark.wide
@pytest.mark.parametrize(("page_size", "flags"), [(1, TREE), (16, TREE), (16, HOST)])
def test_prefixes_in_its_tree(serve_pairs, tiny, account, tmp_path, page_size, flags):
    """Prevents a shared prefix that a round changes, a compacted answer in the tree, and a row that comes back from the
    host over a prefix that others read."""
    retractions = Retractions(tmp_path / "probe")
    args = ("--page-size", str(page_size), *KEYS_ALONE, *POOL, *flags)
    client = serve_pairs(*args, model=tiny, env={**RETRACT, **retractions.env})
    stem = prompt(12, 48)
    answer = client.generate(stem, 40)
    # The prefill server has the prompt alone, the tree also what followed, until a round.
    short = stem + answer["output_ids"]
    found = client.generate([*short, *prompt(13, 9)], 240, logprobs=True)
    # With overlap, a step for the last token was queued.
    assert found["meta_info"]["cached_tokens"] == (48 + 40) // page_size * page_size
    assert_account(account, [*short, *prompt(13, 9)], found)
    following = [*short, *prompt(13, 9), *found["output_ids"]]
    known = client.generate(following, 1)["meta_info"]["cached_tokens"]
    assert (48 + 40 + 9) // page_size * page_size == known

    prompts = [stem + prompt(20 + number, 30 + number) for number in range(4)]
    hold_to_account(client, account, retractions, prompts)
    storm(client, BUDGET + INTERVAL + page_size)
    serve_pairs.stop(client)


@pytest.mark.wide
def test_replicas(forkserver, tiny, account, tmp_path):
    """Prevents K/V that arrives in another replica's pool, and replicas of which one does not compress."""
    retractions, replicas = Retractions(tmp_path / "probe"), ("--dp-size", "2")
    env = {**two_cores(), **RETRACT, **retractions.env}
    args = ("--page-size", "16", *POOL)
    with running_separated(forkserver, tiny, tmp_path, *args, decode=replicas, env=env) as (client,):
        hold_to_account(client, account, retractions, [prompt(20 + number, 30 + number) for number in range(5)])
        storm(client, BUDGET + INTERVAL + 16)
        assert all(rounds > 20 for rounds in client.rounds_by_rank())


@pytest.mark.wide
def test_adapters(serve_pairs, tiny, account, tmp_path):
    """Prevents K/V of one adapter's request in the row of another's, and rounds that mix them up."""
    (tmp_path / "adapter").mkdir()
    flags = serving(build_adapter(tmp_path / "adapter", tiny))
    env = {"PYTHONPATH": python_path(install_unpinned(tmp_path / "unpinned"))}
    client = serve_pairs(*flags, *KEYS_ALONE, *POOL, model=tiny, env=env)
    ids, loras = prompt(31, 40), [None, "other", "other", None]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda lora: client.generate(ids, 260, logprobs=True, lora=lora), loras))
    adapted = merge(replace(account, **vars(replace(oracle_of(tiny), value_share=0.0))), tiny)
    for lora, answer in zip(loras, answers, strict=True):
        assert_account(adapted if lora else account, ids, answer)
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    assert_pool_is_whole(client)
    serve_pairs.stop(client)
