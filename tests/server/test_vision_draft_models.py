"""Vision-language models with a draft model: what that reads of an image, and drafts after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import transformers

from block_drafts import build_block_model
from draft_heads import build_eagle, llama_config
from draft_pairs import (
    ASSISTANT,
    MODES,
    OF_BLOCKS,
    WITH_LAYER,
    Pair,
    adapting,
    assert_some_hold,
    cores_of,
    drafts_with_account,
    hold_each_length,
)
from draft_trees import TreePair
from encoder_servers import ADDRESS, encoded_by, running_encoder
from family_servers import prepared
from gemma4_family import ASSISTED, build_assistant
from harness import BUDGET, INTERVAL, KEYS_ALONE, Client, assert_pool_is_whole, compression, greedy, prompt
from host_tier import FEW_STATES, HOST_TIER, RESERVE, fill_the_pool, hits
from repeating_model import in_circle, make_repeating
from sets import wide
from state_family import build_whole_qwen
from storm import FLAGS, RETRACTING, assert_withstood, storm
from vision_account import Accounts, encoded
from vision_families import VisionModel, build_vision_model
from vision_servers import ask, ask_each, with_images, words

# A prompt after which some drafts hold and some do not.
STEM, TAIL = words(prompt(31, 24)), words(prompt(5, 12) + in_circle(38))
# Models for which another one drafts.
TARGETS = {"EAGLE3 axes": "qwen2.5-vl", "EAGLE3 deepstack": "qwen3-vl"}


@dataclass(frozen=True)
class Asked:
    """A pair whose account is that of one prompt with an image.

    Attributes:
        ids: of the prompt.
    """

    pair: Pair
    ids: list[int]

    def started(self, start: Callable, *flags: str, env: dict[str, str] | None = None, **options: Any) -> Any:
        """What `serve`, or `probed`, returns of a server."""
        pair = self.pair
        settings = pair.settings if options.get("compressed", True) else ()
        env = {**pair.env, **(env or {})}
        return start(*pair.args, *settings, *flags, model=pair.target, env=env, tokenizer=True, **options)

    def answer(self, client: Client, tokens: int, **sampling: Any) -> dict[str, Any]:
        model = self.pair.target
        return ask(client, [model.with_image(STEM, TAIL)], [model.picture(1)], tokens, **sampling)[0]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """`asked(name)` builds a model that takes images, and what drafts for it, once."""

    @cache
    def build(name: str) -> Asked:
        folder = tmp_path_factory.mktemp("drafts")
        target, head = (prepared(folder, WITH_LAYER[name])[0], None) if name in WITH_LAYER else with_head(folder, name)
        model = VisionModel(**vars(target))
        ids, account = Accounts.of(model).of_prompt(model.with_image(STEM, TAIL), model.picture(1))
        return Asked(Pair(name, target, account, head), ids)

    return build


def with_head(folder: Path, name: str) -> tuple[VisionModel, Path]:
    """The model, and where its draft model is, which has the axes of the model's rotary positions if it is to."""
    if name == ASSISTANT:
        target = build_vision_model(folder, ASSISTED)
        return target, build_assistant(folder, target.path)
    if name in OF_BLOCKS:
        target = prepared(folder, OF_BLOCKS[name])[0]
        return target, build_block_model(folder, target)
    target = build_whole_qwen(folder, TARGETS[name])
    make_repeating(target)
    text = transformers.AutoConfig.from_pretrained(target.path).get_text_config()
    rope = {"rope_parameters": text.rope_parameters} if name.endswith("axes") else {}
    head = llama_config(vocab_size=text.vocab_size, **rope)
    return target, build_eagle(folder, target, third=True, noise=0.45, config=head)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("NEXTN published", "moved"),
        *(wide("NEXTN published", mode) for mode in ("pages", "remapped", "overlap off", "groups")),
        wide("NEXTN experts", "moved"),
        wide("NEXTN experts", "pages"),
        *(wide("EAGLE3 axes", mode) for mode in ("moved", "pages", "overlap off")),
        *(wide("EAGLE3 deepstack", mode) for mode in ("moved", "pages")),
        *(wide("NEXTN assistant windows", mode) for mode in ("moved", "pages")),
        *(wide("DFLASH published", mode) for mode in ("moved", "pages")),
    ],
)
def test_logits_and_drafts(probed, asked, name, mode):
    """Prevents wrong positions of drafted and verified tokens after an image and a round, K/V of accepted ones, or of
    the image, that a round loses, and a draft model that reads of an image something else than its encoder returns."""
    one = asked(name)
    client, steps = one.started(probed, *MODES[mode], *KEYS_ALONE, env=cores_of(mode))
    page_size = client.setting("page_size")
    client.flush()
    steps()
    response = one.answer(client, 250 + 100 * one.pair.has_windows)
    frozen = len(one.ids) - len(one.ids) % page_size
    found = drafts_with_account(one.pair, mode, one.ids, response, steps(), frozen)
    assert compression(response)["frozen_length"] == frozen
    assert compression(response)["rounds"] >= 5
    assert_some_hold(one.pair, found, 60)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mode"), [("EAGLE3 axes", "moved"), ("EAGLE3 deepstack", "pages")])
def test_drafts_after_an_image_that_another_server_encodes(forkserver, probed, asked, tmp_path, name, mode):
    """Prevents a draft model that reads of an image something else than arrives encoded."""
    one, backend = asked(name), "zmq_to_scheduler"
    target = one.pair.target
    with running_encoder(forkserver, target, tmp_path / "encoder.log", backend) as encoder:
        encoding = encoded_by(encoder, backend)
        client, steps = one.started(probed, *MODES[mode], *KEYS_ALONE, *encoding, env=ADDRESS)
        (response,) = ask_each(client, [target.with_image(STEM, TAIL)], [target.picture(1)], 250)
        hold_to_account(one, mode, client, response, steps())


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mode"), [("NEXTN published", "moved"), ("EAGLE3 axes", "pages")])
def test_drafts_that_branch(probed, asked, name, mode):
    """Prevents trees of tokens after an image whose tokens stand, or whose branches read, elsewhere than they should:
    each tree is that of an account."""
    one = asked(name)
    one = replace(one, pair=TreePair.of(one.pair))
    client, steps = one.started(probed, *MODES[mode], *KEYS_ALONE)
    client.flush()
    steps()
    response = one.answer(client, 250)
    hold_to_account(one, mode, client, response, steps())


@pytest.mark.wide
def test_drafts_whose_length_changes(probed, asked, tmp_path):
    """Prevents rounds that come too late or too early after an image, where SGLang drafts more or fewer tokens by the
    size of the batch."""
    one, mode = asked("EAGLE3 axes"), "moved"
    model = VisionModel(**vars(one.pair.target))
    client, steps = one.started(probed, *adapting(tmp_path), *MODES[mode], *KEYS_ALONE)
    tails = [words(prompt(5 + number, 12) + in_circle(38, 9 * number)) for number in range(3)]
    texts = [model.with_image(STEM, tail) for tail in tails]
    client.flush()
    steps()
    answers = ask(client, texts, [model.picture(1)] * 3, (200, 330, 480))
    seen, accounts = steps(), Accounts.of(model)
    held = []
    for text, answer in zip(texts, answers, strict=True):
        ids, account = accounts.of_prompt(text, model.picture(1))
        held.append((replace(one.pair, account=account), ids, answer))
    hold_each_length(client, seen, held, mode)


@pytest.mark.wide
@pytest.mark.parametrize("name", ["NEXTN published", "EAGLE3 axes", "EAGLE3 deepstack"])
def test_drafts_hold_after_rounds(serve, asked, name):
    """Prevents drafts after an image that hold no longer once rounds have come: they hold about as often as those of a
    request that is not compressed."""
    client = asked(name).started(serve, *MODES["pages"], *KEYS_ALONE)
    rates = []
    for enabled in (True, False):
        client.flush()
        response = asked(name).answer(client, 530, custom_params={"triattention": {"enabled": enabled}})
        assert (response["meta_info"].get("triattention", {}).get("rounds", 0) >= 10) == enabled
        rates.append(response["meta_info"]["spec_accept_rate"])
    assert all(0.2 < rate < 0.9 for rate in rates)
    assert abs(rates[0] - rates[1]) < 0.1


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["NEXTN published", "DFLASH published", "EAGLE3 axes", "EAGLE3 deepstack", "NEXTN assistant windows"]
)
def test_bit_identical_below_the_trigger(serve, asked, name):
    """Prevents compression from changing an answer after an image, a log-probability or an acceptance before it has
    evicted."""
    one = asked(name)
    ours, theirs = (
        one.answer(one.started(serve, "--page-size", "1", compressed=each), BUDGET + INTERVAL) for each in (True, False)
    )
    assert compression(ours)["rounds"] == 0
    for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
        assert ours["meta_info"][field] == theirs["meta_info"][field], field
    assert ours["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.wide
@pytest.mark.parametrize(
    "name", ["NEXTN published", "DFLASH published", "EAGLE3 axes", "EAGLE3 deepstack", "NEXTN assistant windows"]
)
def test_storm(serve, asked, name):
    """Prevents slots for drafts, states or images that are lost or owned twice where requests with images and without
    are aborted, retracted and compacted while they are prefilled."""
    one = asked(name)
    pool = ("--max-total-tokens", "1536", *FLAGS)
    client = one.started(serve, *MODES["pages"], *KEYS_ALONE, *pool, env=RETRACTING)
    _, finished = storm(client, 1, 30, one.pair.budgets, 1500, fields=with_images(one.pair.target))
    assert_withstood(client, finished, 30)
    serve.stop(client)


def hold_to_account(one: Asked, mode: str, client: Client, response: dict[str, Any], steps: list[dict]) -> None:
    """Holds an answer of several rounds, and the drafts of it, to their account, and the server to a whole pool."""
    frozen = len(one.ids) - len(one.ids) % client.setting("page_size")
    found = drafts_with_account(one.pair, mode, one.ids, response, steps, frozen)
    assert compression(response)["rounds"] >= 5
    assert len(found) > 40
    assert sum(found) > 0
    assert_pool_is_whole(client)


@pytest.mark.wide
@pytest.mark.parametrize(("name", "mode"), [("NEXTN published", "moved"), ("EAGLE3 deepstack", "pages")])
def test_drafts_after_an_image_from_the_host(probed, asked, name, mode):
    """Prevents K/V of an image, of a draft model or states from coming back altered, and drafts from K/V of other
    tokens: each is that of an account."""
    one = asked(name)
    few = FEW_STATES if name == "NEXTN published" else ()
    flags = (*MODES[mode], *KEYS_ALONE, *HOST_TIER, "--hicache-ratio", "4", *few)
    client, steps = one.started(probed, *flags, env=RESERVE)
    one.answer(client, 1)
    fill_the_pool(client, 340)
    steps()
    response = one.answer(client, 250)
    assert hits(response)["host"] >= 64
    hold_to_account(one, mode, client, response, steps())


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "mode"),
    [("NEXTN published", "overlap off"), ("EAGLE3 axes", "moved"), ("EAGLE3 deepstack", "pages")],
)
def test_on_a_decode_server(serve_pairs, probed_pairs, asked, name, mode):
    """Prevents K/V of an image, of a draft model or states that arrive elsewhere than in the row, and drafts from K/V
    of other tokens: each is that of an account."""
    one = asked(name)
    client, steps = one.started(probed_pairs, *MODES[mode], *KEYS_ALONE)
    steps()
    # The router takes one prompt at a time.
    text, picture = one.pair.target.with_image(STEM, TAIL), encoded(one.pair.target.picture(1))
    asking = {"sampling_params": greedy(250), "return_logprob": True, "top_logprobs_num": 5}
    answer = client.post("/generate", text=text, image_data=picture, **asking)
    assert answer.status_code == 200, answer.text
    response = answer.json()
    hold_to_account(one, mode, client, response, steps())
    serve_pairs.stop(client)
