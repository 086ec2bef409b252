"""Speculative decoding with drafts that branch, compressed: as SGLang chooses them for a Llama."""

from __future__ import annotations

import pytest

from draft_pairs import MODES, Pairs, assert_some_hold, cores_of, hold_adapter, hold_drafts, weather_storm
from draft_trees import BRANCHES, TREE_STEPS, TreePair
from harness import BUDGET, INTERVAL, KEYS_ALONE, assert_pool_is_whole, compression, prompt
from repeating_model import build_repeating_model, in_circle
from sets import wide
from storm import FLAGS, RETRACTING

CASES = [
    ("EAGLE", "pages"),
    wide("EAGLE", "moved"),
    wide("EAGLE", "remapped"),
    wide("EAGLE", "overlap off"),
    wide("EAGLE", "ranks"),
    wide("EAGLE3", "moved"),
    wide("EAGLE3", "pages"),
    *(wide("EAGLE3 windows", mode) for mode in ("pages", "moved", "groups")),
    *(wide("NEXTN latent", mode) for mode in ("pages", "groups")),
    *(wide("NEXTN states", mode) for mode in ("pages", "overlap off")),
    wide("NEXTN axes", "moved"),
    wide("STANDALONE", "moved"),
]


@pytest.fixture(scope="module")
def pairs(tiny, tmp_path_factory):
    """A TreePair for each way of drafting, by its name."""
    repeating = build_repeating_model(tmp_path_factory.mktemp("repeating"))
    chains = Pairs(tiny, repeating, tmp_path_factory.mktemp("drafts"))

    class Trees(dict[str, TreePair]):
        def __missing__(self, name: str) -> TreePair:
            self[name] = TreePair.of(chains[name])
            return self[name]

    return Trees()


@pytest.mark.parametrize(("name", "mode"), CASES)
def test_logits_and_drafts(probed, pairs, name, mode):
    """Prevents wrong positions of a tree's tokens after a round, K/V of an accepted branch that are not moved to the
    row's end or that a round loses, and branches that read others than their own: each tree is that of an account."""
    pair = pairs[name]
    env = {**pair.env, **cores_of(mode)}
    client, steps = probed(*pair.args, *MODES[mode], *pair.settings, *KEYS_ALONE, model=pair.target, env=env)
    found = []
    for ids in pair.texts():
        client.flush()
        found += hold_drafts(client, steps, pair, mode, ids, 300 + 100 * pair.has_windows)
    assert_some_hold(pair, found, 40)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "page_size"),
    [("EAGLE", "1"), ("EAGLE", "16"), ("EAGLE3", "16"), ("EAGLE3 windows", "16"), ("NEXTN states", "1")],
)
def test_bit_identical_below_the_trigger(serve, pairs, name, page_size):
    """Prevents compression from changing an answer, a log-probability or an acceptance before it has evicted, and trees
    whose verification gives another answer than the model alone."""
    pair = pairs[name]
    served = {"model": pair.target, "env": pair.env}
    client = serve(*pair.args, *pair.settings, "--page-size", page_size, **served)
    plain = serve(*pair.args, "--page-size", page_size, **served, compressed=False)
    without = serve(*pair.code, "--page-size", page_size, **served, compressed=False)
    for server in (client, plain):
        server.flush()
    # The end of a prompt that fills no page may be evicted, too.
    length = BUDGET + INTERVAL - int(page_size) + 1
    for ids in (prompt(1, 60), in_circle(30), prompt(2, 9) + in_circle(20, 7)):
        ours, theirs = (each.generate(ids, length, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for name in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
            assert ours["meta_info"][name] == theirs["meta_info"][name], name
        assert ours["output_ids"] == theirs["output_ids"] == without.generate(ids, length)["output_ids"]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("EAGLE", "pages"),
        ("EAGLE", "moved"),
        ("EAGLE3", "pages"),
        ("EAGLE3 windows", "pages"),
        ("NEXTN states", "pages"),
    ],
)
def test_storm(serve, pairs, name, mode):
    """Prevents slots of branches that are lost or owned twice where requests are aborted, retracted, resumed and
    compacted while they are prefilled."""
    pair = pairs[name]
    # In pages of 16, a request may reserve 256 slots on top of its row.
    pool = ("--max-total-tokens", "3072" if mode == "pages" else "1024", *FLAGS)
    client = serve(*pair.args, *MODES[mode], *pair.settings, *pool, model=pair.target, env={**pair.env, **RETRACTING})
    weather_storm(client, pair)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mode"), [("EAGLE", "pages"), ("EAGLE3", "moved")])
def test_adapters(probed, pairs, tmp_path, monkeypatch, name, mode):
    """Prevents trees for an adapter's requests from being verified without the adapter, or at wrong places."""
    hold_adapter(probed, pairs[name], mode, tmp_path, monkeypatch)


@pytest.mark.wide
def test_answers_to_the_end_of_the_context(serve, pairs):
    """Prevents slots of branches that are written past a row's end, to the row of another request."""
    pair = pairs["EAGLE"]
    flags = (*pair.args, "--page-size", "1", "--context-length", "320")
    client = serve(*flags, model=pair.target, env=pair.env)
    asked = [prompt(number, 100) for number in range(3)]
    # SGLang sets aside what a step drafts.
    longest = 320 - 100 - TREE_STEPS * BRANCHES
    answers = client.generate_all(asked, longest, custom_params={"triattention": {"enabled": False}})
    assert all(len(answer["output_ids"]) == longest for answer in answers)
    assert_pool_is_whole(client)
    serve.stop(client)
