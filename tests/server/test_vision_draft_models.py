"""Vision-language models with a draft model: what that reads of an image, and drafts after it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from draft_pairs import MODES, WITH_LAYER, Pair, drafts_with_account
from family_servers import prepared
from harness import BUDGET, INTERVAL, KEYS_ALONE, STEPS, compression, prompt
from repeating_model import in_circle
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm
from vision_account import Accounts
from vision_families import VisionModel
from vision_servers import ask, with_images, words

# Prompts after which some drafts hold and some do not.
STEM, TAIL = words(prompt(31, 24)), words(prompt(5, 12) + in_circle(38))


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """`pairs(name)` builds a Pair once, whose model takes images."""

    @cache
    def build(name: str) -> Pair:
        return Pair(name, *prepared(tmp_path_factory.mktemp("drafts"), WITH_LAYER[name]), None)

    return build


def started(start, pair: Pair, *flags: str, **options):
    """What `serve`, or `probed`, returns of a server of the pair."""
    return start(
        *pair.args, *flags, model=pair.target, env={**pair.env, **options.pop("env", {})}, tokenizer=True, **options
    )


def asked(client, pair: Pair, tokens: int, **sampling):
    """The answer to a prompt with an image."""
    text, image = pair.target.with_image(STEM, TAIL), pair.target.picture(1)
    return ask(client, [text], [image], tokens, **sampling)[0]


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("NEXTN published", "moved"),
        *(wide("NEXTN published", mode) for mode in ("pages", "remapped", "overlap off")),
        wide("NEXTN experts", "moved"),
        wide("NEXTN experts", "pages"),
    ],
)
def test_logits_and_drafts(probed, pairs, name, mode):
    """Prevents wrong positions of drafted and verified tokens after an image and a round, K/V of accepted ones, or of
    the image, that a round loses, and a draft model that reads of an image something else than its encoder returns."""
    pair = pairs(name)
    client, steps = started(probed, pair, *MODES[mode], *KEYS_ALONE)
    page_size = client.setting("page_size")
    model = VisionModel(**vars(pair.target))
    ids, account = Accounts.of(model).of_prompt(model.with_image(STEM, TAIL), model.picture(1))
    client.flush()
    steps()
    response = asked(client, pair, 250)
    frozen = len(ids) - len(ids) % page_size
    found = drafts_with_account(replace(pair, account=account), mode, ids, response, steps(), frozen)
    assert compression(response)["frozen_length"] == frozen
    assert compression(response)["rounds"] >= 5
    assert len(found) > 60
    # Neither always nor never.
    assert 0.02 * STEPS * len(found) < sum(found) < 0.96 * STEPS * len(found)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["NEXTN published"])
def test_drafts_hold_after_rounds(serve, pairs, name):
    """Prevents drafts after an image that hold no longer once rounds have come: they hold about as often as those of a
    request that is not compressed."""
    client = started(serve, pairs(name), *MODES["pages"], *KEYS_ALONE)
    rates = []
    for enabled in (True, False):
        client.flush()
        response = asked(client, pairs(name), 530, custom_params={"triattention": {"enabled": enabled}})
        assert (response["meta_info"].get("triattention", {}).get("rounds", 0) >= 10) == enabled
        rates.append(response["meta_info"]["spec_accept_rate"])
    assert all(0.2 < rate < 0.9 for rate in rates)
    assert abs(rates[0] - rates[1]) < 0.1


@pytest.mark.wide
@pytest.mark.parametrize("name", ["NEXTN published"])
def test_bit_identical_below_the_trigger(serve, pairs, name):
    """Prevents compression from changing an answer after an image, a log-probability or an acceptance before it has
    evicted."""
    ours, theirs = (
        asked(started(serve, pairs(name), "--page-size", "1", compressed=each), pairs(name), BUDGET + INTERVAL)
        for each in (True, False)
    )
    assert compression(ours)["rounds"] == 0
    for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
        assert ours["meta_info"][field] == theirs["meta_info"][field], field
    assert ours["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.wide
@pytest.mark.parametrize("name", ["NEXTN published"])
def test_storm(serve, pairs, name):
    """Prevents slots for drafts, states or images that are lost or owned twice where requests with images and without
    are aborted, retracted and compacted while they are prefilled."""
    pair = pairs(name)
    pool = ("--max-total-tokens", "1536", *FLAGS)
    client = started(serve, pair, *MODES["pages"], *KEYS_ALONE, *pool, env=RETRACTING)
    _, finished = storm(client, 1, 40, (24, BUDGET), 1500, fields=with_images(pair.target))
    assert_withstood(client, finished, answers=20, retracted=3, rounds=13)
    serve.stop(client)
