"""Drafted tokens on a decode server, to which a prefill server sends the draft model's K/V and first draft, too."""

from __future__ import annotations

import pytest

from disaggregated_servers import RETRACT_NOW_AND_THEN, TREE, storm
from draft_pairs import (
    KEEP_STATES,
    MODES,
    Pairs,
    adapting,
    assert_some_hold,
    drafts_with_account,
    hold_changing_lengths,
    hold_drafts,
)
from draft_trees import TreePair
from families import WINDOW
from harness import INTERVAL, KEYS_ALONE, STEPS, assert_pool_is_whole, compression
from repeating_model import build_repeating_model, in_circle
from sets import wide


@pytest.fixture
def pairs(tiny, tmp_path) -> Pairs:
    return Pairs(tiny, build_repeating_model(tmp_path), tmp_path)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        wide("EAGLE", "moved"),
        wide("EAGLE", "pages"),
        wide("EAGLE", "overlap off"),
        wide("DFLASH", "moved"),
        wide("DFLASH", "pages"),
        wide("EAGLE3", "pages"),
        wide("EAGLE3 windows", "pages"),
        wide("NEXTN latent", "pages"),
        wide("NEXTN states", "overlap off"),
        wide("NEXTN axes", "overlap off"),
        wide("EAGLE layers windows", "pages"),
        wide("EAGLE layers windows", "moved"),
        wide("EAGLE chained layers windows", "remapped"),
    ],
)
def test_logits_and_drafts(serve_pairs, probed_pairs, pairs, name, mode):
    """Prevents K/V of a draft model that arrives elsewhere than in the row, or that a round takes for other tokens':
    each of its drafts is that of an account."""
    pair = pairs[name]
    flags = (*pair.args, *MODES[mode], *pair.settings, *KEYS_ALONE)
    client, steps = probed_pairs(*flags, model=pair.target, env=pair.env)
    (ids,) = pair.texts()
    # Of a prompt, SGLang sends no K/V of draft layers' windows, which later tokens fill.
    first = len(ids) + STEPS * WINDOW if pair.in_layers else 0
    found = hold_drafts(client, steps, pair, mode, ids, 300 + 100 * pair.has_windows, first)
    assert_some_hold(pair, found, 60)
    assert_pool_is_whole(client)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [("EAGLE", "pages"), ("EAGLE3", "moved"), ("EAGLE3 windows", "pages"), ("NEXTN states", "overlap off")],
)
def test_drafts_that_branch(serve_pairs, probed_pairs, pairs, name, mode):
    """Prevents first drafts that arrive without their branches, and K/V of accepted ones that are not moved to the end
    of a row that another server has begun: each tree is that of an account."""
    pair = TreePair.of(pairs[name])
    client, steps = probed_pairs(*pair.args, *MODES[mode], *pair.settings, *KEYS_ALONE, model=pair.target, env=pair.env)
    (ids,) = pair.texts()
    assert_some_hold(pair, hold_drafts(client, steps, pair, mode, ids, 300 + 100 * pair.has_windows), 40)
    assert_pool_is_whole(client)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize("mode", ["moved", "pages"])
def test_drafts_whose_length_changes(serve_pairs, probed_pairs, pairs, tmp_path, mode):
    """Prevents rounds that come too late or too early, and reserves of another length than those of the step, where a
    batch grows by requests whose first draft another server has sent."""
    pair = pairs["EAGLE"]
    flags = (*pair.args, *adapting(tmp_path), *MODES[mode], *KEYS_ALONE)
    client, steps = probed_pairs(*flags, model=pair.target, env=pair.env)
    hold_changing_lengths(client, steps, pair, mode)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "page_size", "tree"),
    [
        ("EAGLE", 1, ()),
        ("EAGLE adaptive", 16, ()),
        ("EAGLE", 16, ()),
        ("EAGLE", 16, TREE),
        ("DFLASH", 16, ()),
        ("EAGLE3 windows", 16, ()),
        ("EAGLE3 windows", 16, TREE),
        ("EAGLE layers windows", 16, ()),
        ("NEXTN states", 1, ()),
        ("NEXTN states", 1, TREE),
    ],
)
def test_storm(serve_pairs, pairs, tmp_path, name, page_size, tree):
    """Prevents leaks of reserves where requests are aborted, and retracted while a step of drafts is queued."""
    pair = pairs[name.removesuffix(" adaptive")]
    schedule = MODES["overlap off"] if name in KEEP_STATES else ()
    if name.endswith("adaptive"):
        schedule = adapting(tmp_path)
    flags = (*pair.args, *pair.settings, *schedule, *tree, "--page-size", str(page_size), "--max-total-tokens", "2048")
    client = serve_pairs(*flags, model=pair.target, env={**pair.env, **RETRACT_NOW_AND_THEN})
    storm(client, pair.account.budget + INTERVAL + 2 * (STEPS + 1) + page_size)
    serve_pairs.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("EAGLE", "moved"),
        ("EAGLE3", "pages"),
        ("NEXTN latent", "pages"),
        ("EAGLE3 windows", "pages"),
        ("NEXTN states", "overlap off"),
    ],
)
def test_prefixes_in_its_tree(serve_pairs, probed_pairs, pairs, name, mode):
    """Prevents a shared prefix, or the draft model's K/V of it, that a round changes, and drafts from K/V of other
    tokens after a prefix of the decode server's own: each is that of an account."""
    pair = pairs[name]
    flags = (*pair.args, *MODES[mode], *pair.settings, *KEYS_ALONE, *TREE)
    client, steps = probed_pairs(*flags, model=pair.target, env=pair.env)
    page_size = client.setting("page_size")
    (stem,) = pair.texts()
    first = client.generate(stem, 40)
    # The prefill server has the prompt alone, the tree also what followed.
    ids = [*stem, *first["output_ids"], *in_circle(9, 5)]
    steps()
    answer = client.generate(ids, 300 + 100 * pair.has_windows, logprobs=True)
    found = drafts_with_account(pair, mode, ids, answer, steps(), len(ids) - len(ids) % page_size)
    assert compression(answer)["rounds"] >= 6
    assert len(found) > 60
    # Of windows, SGLang shares nothing beyond the prompt.
    cached = answer["meta_info"]["cached_tokens"]
    assert cached == len(stem) - len(stem) % page_size if pair.has_windows else cached > len(stem)
    assert_pool_is_whole(client)
    serve_pairs.stop(client)
