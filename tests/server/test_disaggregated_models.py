"""Models whose KV is of other kinds than keys and values of all tokens in one pool, on a decode server."""

from __future__ import annotations

import pytest

from disaggregated_servers import (
    RETRACT,
    RETRACT_NOW_AND_THEN,
    TREE,
    Pairs,
    Retractions,
    Separated,
    hold_to_account,
    storm,
)
from family_servers import LATENTS, prepared, selecting, started
from harness import INTERVAL, KEYS_ALONE, TWO_GROUPS, assert_pool_is_whole, compression, cores_for, prompt
from sets import wide
from tiny_model import TinyModel

# No answer to these ends in the step of a round, whose queued step would count as one more.
PROMPTS = [prompt(40 + length, length) for length in (29, 33, 37)]
TWO_RANKS = ("--tp-size", "2")
# With overlap, SGLang computes a retracted request's newest token again on a state that has seen it.
IN_TURN = ("--disable-overlap-schedule",)


def servers_of(
    serve_pairs: Pairs, model: TinyModel, family: str, page_size: int, selection: str, *flags: str, env: dict[str, str]
) -> Separated:
    """A prefill and a decode server, of which the latter retracts requests now and then."""
    args = (*selecting(page_size, selection), *KEYS_ALONE, *flags)
    return started(serve_pairs, model, family, *args, env={**cores_for(flags), **RETRACT, **env})


@pytest.mark.parametrize(
    ("family", "page_size", "selection", "flags"),
    [
        wide("deepseek-v3", 32, "per-layer-head", ()),
        wide("deepseek-v3", 1, "shared-mean", TWO_RANKS),
        wide("deepseek-v3", 1, "shared-mean", TWO_GROUPS),
        wide("qwen3-moe-all", 16, "per-layer-head", TWO_GROUPS),
        ("gpt-oss", 16, "per-layer-head", ()),
        wide("gpt-oss", 1, "per-layer-head", ()),
        wide("gpt-oss", 16, "per-layer-head", TREE),
        wide("qwen3-next", 1, "shared-mean", IN_TURN),
        wide("qwen3-next", 1, "shared-mean", (*IN_TURN, *TREE)),
    ],
)
def test_logits(serve_pairs, tmp_path, family, page_size, selection, flags):
    """Prevents K/V, latents or states that arrive, or come back from the host, elsewhere than in the row; a window that
    loses tokens there; and groups of ranks that wait for one another."""
    tiny, account = prepared(tmp_path, family)
    ranks = 2 if flags == TWO_RANKS else 1
    account.selection, account.value_share = selection, 0.0
    if family in LATENTS:
        account.num_kv_heads = ranks
    retractions = Retractions(tmp_path / "probe")
    client = servers_of(serve_pairs, tiny, family, page_size, selection, *flags, env=retractions.env)
    # A group does not retract its only request.
    prompts = PROMPTS if flags == TWO_GROUPS else PROMPTS[:2]
    hold_to_account(client, account, retractions, prompts, ranks, overlaps=IN_TURN[0] not in flags)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [16, 1])
def test_answers_longer_than_either_pool(serve_pairs, tmp_path, page_size):
    """Prevents an answer from waiting for ever for slots of window layers that it will not need, and two of them from
    taking one another's."""
    tiny, _ = prepared(tmp_path, "gpt-oss")
    flags = ("--max-total-tokens", "640", "--swa-full-tokens-ratio", "0.4")
    client = servers_of(serve_pairs, tiny, "gpt-oss", page_size, "per-layer-head", *flags, env={})
    prompts = [prompt(63, 40), prompt(64, 50)]
    for ids, answer in zip(prompts, client.generate_all(prompts, 700), strict=True):
        report = compression(answer)
        assert report["physical_length"] + report["evicted_tokens"] == report["logical_length"] == len(ids) + 699
    assert_pool_is_whole(client)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "page_size", "flags"),
    [
        ("deepseek-v3", 32, ()),
        ("deepseek-v3", 1, TWO_GROUPS),
        ("gpt-oss", 16, ("--swa-full-tokens-ratio", "0.4")),
        ("gpt-oss", 1, ("--swa-full-tokens-ratio", "0.4")),
        ("gpt-oss", 16, TREE),
        ("qwen3-next", 1, IN_TURN),
        ("qwen3-next", 1, (*IN_TURN, *TREE)),
    ],
)
def test_storm(serve_pairs, tmp_path, family, page_size, flags):
    """Prevents leaks of what a model of this kind holds, where requests are aborted and retracted in any stage."""
    tiny, account = prepared(tmp_path, family)
    flags = ("--max-total-tokens", "1024", *flags)
    client = servers_of(serve_pairs, tiny, family, page_size, "per-layer-head", *flags, env=RETRACT_NOW_AND_THEN)
    storm(client, account.budget + INTERVAL + page_size, tokens=180)
    serve_pairs.stop(client)
