"""Speculative decoding with drafts from a second model, compressed: STANDALONE, EAGLE, EAGLE-3 and MTP."""

from __future__ import annotations

from itertools import pairwise

import pytest

from draft_heads import build_eagle
from draft_pairs import (
    MODES,
    WITH_LAYER,
    Pair,
    Pairs,
    adapting,
    assert_some_hold,
    choosing,
    cores_of,
    drafts_with_account,
    hold_adapter,
    hold_changing_lengths,
    hold_drafts,
    weather_storm,
)
from family_servers import STATE_FLAGS, prepared
from harness import (
    BUDGET,
    DRAFTS,
    INTERVAL,
    KEYS_ALONE,
    STEPS,
    assert_pool_is_whole,
    compressed_args,
    compression,
    prompt,
)
from launches import launch
from ngram_account import computed_before
from oracle import oracle_of
from repeating_model import build_repeating_model, in_circle
from sets import wide
from step_drafts import CHAINED
from storm import FLAGS, RETRACTING

CASES = [
    wide("STANDALONE", "moved"),
    wide("STANDALONE", "pages"),
    wide("STANDALONE", "remapped"),
    ("EAGLE", "moved"),
    wide("EAGLE", "pages"),
    wide("EAGLE", "ordered"),
    wide("EAGLE3", "pages"),
    wide("EAGLE newest", "moved"),
    wide("EAGLE newest", "pages"),
    ("EAGLE3 newest", "moved"),
    wide("EAGLE3 newest", "remapped"),
    ("EAGLE3 windows", "pages"),
    wide("EAGLE3 windows", "moved"),
    wide("EAGLE3 windows", "ordered"),
    wide("EAGLE3 windows", "remapped"),
    wide("EAGLE3 windows", "overlap off"),
    wide("EAGLE3 windows", "ranks"),
    wide("EAGLE3 windows", "groups"),
    ("NEXTN assistant windows", "pages"),
    wide("NEXTN assistant windows", "remapped"),
    wide("NEXTN assistant windows", "ranks"),
    wide("EAGLE layers windows", "moved"),
    ("EAGLE layers windows", "remapped"),
    wide("EAGLE layers windows", "overlap off"),
    wide("EAGLE layers windows", "ranks"),
    wide("EAGLE layers windows", "groups"),
    wide("NEXTN layers windows", "pages"),
    wide("EAGLE chained layers windows", "remapped"),
    wide("EAGLE chained layers windows", "moved"),
    wide("EAGLE chained layers windows", "ranks"),
    wide("NEXTN chained layers windows", "pages"),
    wide("EAGLE", "ranks"),
    wide("EAGLE", "overlap off"),
    ("DFLASH", "moved"),
    wide("DFLASH", "pages"),
    wide("DFLASH", "remapped"),
    wide("DFLASH", "ranks"),
    wide("DFLASH", "overlap off"),
    wide("DFLASH", "ordered"),
    wide("DFLASH near", "pages"),
    wide("DFLASH newest", "moved"),
    wide("DFLASH windows", "pages"),
    wide("DFLASH states", "moved"),
    wide("DFLASH latent", "pages"),
    wide("NEXTN", "moved"),
    wide("NEXTN latent", "moved"),
    wide("NEXTN latent", "pages"),
    wide("NEXTN latent", "remapped"),
    wide("NEXTN latent", "groups"),
    wide("NEXTN states", "moved"),
    ("NEXTN states", "pages"),
    wide("NEXTN states", "remapped"),
    wide("NEXTN states", "overlap off"),
    wide("NEXTN states", "ranks"),
    wide("NEXTN states", "groups"),
    wide("NEXTN more states", "moved"),
    wide("NEXTN axes", "moved"),
    wide("NEXTN axes", "pages"),
    wide("NEXTN axes", "groups"),
    wide("NEXTN published", "moved"),
]


@pytest.fixture(scope="module")
def repeating(tmp_path_factory):
    return build_repeating_model(tmp_path_factory.mktemp("repeating"))


@pytest.fixture(scope="module")
def pairs(tiny, repeating, tmp_path_factory):
    return Pairs(tiny, repeating, tmp_path_factory.mktemp("drafts"))


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_and_drafts(probed, pairs, name, mode):
    """Prevents wrong positions of drafted and verified tokens after a round, K/V of accepted ones that a round loses,
    and a draft model that attends to other tokens than it should: each of its drafts is that of an account."""
    pair = pairs[name]
    env = {**pair.env, **cores_of(mode)}
    client, steps = probed(*pair.args, *MODES[mode], *pair.settings, *choosing(mode), model=pair.target, env=env)
    found = []
    for ids in pair.texts():
        client.flush()
        # A step of many layers takes long.
        tokens = 290 if WITH_LAYER.get(name) == CHAINED else 400 if pair.has_windows else 300
        found += hold_drafts(client, steps, pair, mode, ids, tokens)
    assert_some_hold(pair, found, 60)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("EAGLE", "moved"),
        wide("EAGLE3", "pages"),
        wide("EAGLE", "overlap off"),
        wide("EAGLE", "ranks"),
        wide("EAGLE3 windows", "pages"),
        wide("NEXTN latent", "moved"),
        wide("NEXTN states", "pages"),
        wide("NEXTN axes", "moved"),
    ],
)
def test_drafts_whose_length_changes(probed, pairs, tmp_path, name, mode):
    """Prevents rounds that come too late or too early where SGLang drafts more or fewer tokens by the size of the
    batch, and reserves of another length than those of the step that writes to them."""
    pair, flags = pairs[name], adapting(tmp_path)
    env = {**pair.env, **cores_of(mode)}
    client, steps = probed(*pair.args, *flags, *MODES[mode], *pair.settings, *KEYS_ALONE, model=pair.target, env=env)
    client.flush()
    hold_changing_lengths(client, steps, pair, mode)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["moved", "pages"])
def test_a_model_that_drafts_for_itself(probed, serve, repeating, mode):
    """Prevents drafts that no longer hold because of wrong positions after a round: where text decides, not what is
    attended to, all of them hold, before rounds and after."""
    pair = Pair("STANDALONE", repeating, oracle_of(repeating), repeating.path)
    client, steps = probed(*pair.args, *MODES[mode], model=pair.target, env=pair.env)
    client.flush()
    steps()
    ids = in_circle(50)
    response = client.generate(ids, 430)
    assert compression(response)["rounds"] >= 10
    without = serve(*MODES[mode], model=pair.target, env=pair.env)
    assert response["output_ids"] == without.generate(ids, 430)["output_ids"] == in_circle(430, 50)
    done = computed_before(steps(), len(ids))
    taken = [end - start for start, end in pairwise(done)]
    assert len(taken) > 100
    assert set(taken) == {STEPS + 1}


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        "DFLASH windows",
        "EAGLE3 windows",
        "EAGLE layers windows",
        "EAGLE chained layers windows",
        "NEXTN assistant windows",
    ],
)
def test_drafts_hold_after_rounds(serve, pairs, name):
    """Prevents a draft model from reading what window layers have lost, so that its drafts hold no longer: they hold
    about as often as those of a request that is not compressed."""
    pair = pairs[name]
    client = serve(*pair.args, *MODES["pages"], *pair.settings, *KEYS_ALONE, model=pair.target, env=pair.env)
    (ids,) = pair.texts()
    rates = []
    for enabled in (True, False):
        client.flush()
        response = client.generate(ids, 530, custom_params={"triattention": {"enabled": enabled}})
        assert (response["meta_info"].get("triattention", {}).get("rounds", 0) >= 10) == enabled
        rates.append(response["meta_info"]["spec_accept_rate"])
    assert all(0.2 < rate < 0.9 for rate in rates)
    assert abs(rates[0] - rates[1]) < 0.1


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("EAGLE", "moved"),
        ("DFLASH", "moved"),
        ("EAGLE3", "pages"),
        ("NEXTN", "moved"),
        ("NEXTN latent", "moved"),
        ("NEXTN states", "moved"),
        ("NEXTN axes", "moved"),
        ("EAGLE3 windows", "pages"),
        ("EAGLE layers windows", "pages"),
    ],
)
def test_adapters(probed, pairs, tmp_path, monkeypatch, name, mode):
    """Prevents drafts for an adapter's requests, which the base model's draft model makes, from being verified without
    the adapter, or at wrong places after a round."""
    hold_adapter(probed, pairs[name], mode, tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["EAGLE", wide("DFLASH"), wide("NEXTN states")])
def test_drafts_after_a_prompt_compacted_chunk_by_chunk(probed, pairs, name):
    """Prevents a draft model that is given another token than the one after a chunk of a shortened prompt."""
    pair = pairs[name]
    chunks = ("--chunked-prefill-size", "128")
    client, steps = probed(*pair.args, *MODES["moved"], *KEYS_ALONE, *chunks, model=pair.target, env=pair.env)
    client.flush()
    steps()
    # The last whole chunk's end is among the newest tokens when the answer begins.
    ids = prompt(62, 3 * 128 - 12) + in_circle(16)
    response = client.generate(ids, 120, logprobs=True, custom_params={"triattention": {"prompt": "compact"}})
    assert compression(response)["frozen_length"] == 4
    assert drafts_with_account(pair, "moved", ids, response, steps(), 4, chunk=128)
    assert compression(response)["rounds"] >= 5


@pytest.mark.wide
def test_another_model_for_layers_that_keep_a_state(tmp_path):
    """Prevents drafts that have not been tested with states: those of a model other than its own layer."""
    target, _ = prepared(tmp_path, "qwen3-next")
    llama, _ = prepared(tmp_path, "llama")
    drafting = build_eagle(tmp_path, llama, third=False, noise=0.9)
    flags = (*DRAFTS, *STATE_FLAGS, "--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", drafting)
    ended = launch("--model-path", target.path, *compressed_args(target), *flags)
    assert ended.code != 0
    assert "because another model drafts for one whose layers keep a state" in ended.error


@pytest.mark.wide
@pytest.mark.parametrize(
    "name",
    [
        *("EAGLE", "DFLASH", "NEXTN latent", "NEXTN states"),
        *("EAGLE3 windows", "EAGLE layers windows", "EAGLE chained layers windows", "NEXTN assistant windows"),
    ],
)
def test_bit_identical_below_the_trigger(serve, pairs, name):
    """Prevents compression from changing an answer, a log-probability or an acceptance before it has evicted."""
    pair = pairs[name]
    served = {"model": pair.target, "env": pair.env}
    client = serve(*pair.args, *MODES["moved"], *pair.settings, **served)
    plain = serve(*pair.args, "--page-size", "1", **served, compressed=False)
    without = serve(*pair.code, "--page-size", "1", **served, compressed=False)
    for server in (client, plain):
        server.flush()
    for ids in (prompt(1, 60), in_circle(30), prompt(2, 9) + in_circle(20, 7)):
        ours, theirs = (each.generate(ids, BUDGET + INTERVAL, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for name in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
            assert ours["meta_info"][name] == theirs["meta_info"][name], name
        assert ours["output_ids"] == theirs["output_ids"] == without.generate(ids, BUDGET + INTERVAL)["output_ids"]


def test_a_conversation_goes_on(serve, pairs, repeating):
    """Prevents a row that is kept with drafted tokens in it, and a turn whose drafts stand at wrong places."""
    pair = pairs["EAGLE3"]
    client = serve(*pair.args, *MODES["pages"], model=repeating, env=pair.env)
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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        wide("STANDALONE", "moved"),
        ("EAGLE", "pages"),
        wide("EAGLE adaptive", "pages"),
        wide("DFLASH", "pages"),
        wide("DFLASH states", "pages"),
        wide("NEXTN latent", "pages"),
        wide("EAGLE3 windows", "pages"),
        wide("NEXTN assistant windows", "moved"),
        wide("EAGLE layers windows", "pages"),
        wide("EAGLE layers windows", "groups"),
        wide("EAGLE chained layers windows", "moved"),
        wide("NEXTN states", "pages"),
        wide("NEXTN states", "groups"),
        wide("NEXTN axes", "moved"),
    ],
)
def test_storm(serve, pairs, tmp_path, name, mode):
    """Prevents reserves that are lost or owned twice where requests are aborted, retracted, resumed and compacted while
    they are prefilled."""
    pair = pairs[name.removesuffix(" adaptive")]
    pool = ("--max-total-tokens", "1024", *FLAGS, *(adapting(tmp_path) if name.endswith("adaptive") else ()))
    env = {**pair.env, **RETRACTING, **cores_of(mode)}
    client = serve(*pair.args, *MODES[mode], *pair.settings, *pool, model=pair.target, env=env)
    weather_storm(client, pair)
    serve.stop(client)
