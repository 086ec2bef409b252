"""Vision-language models whose answers are drafted: positions, kept sets and drafts after an image."""

from __future__ import annotations

import pytest

from harness import BUDGET, INTERVAL, compression
from ngram_account import DRAFTED, NGRAM, PAGES, answer_by_account, favouring
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm
from vision_account import Accounts, by_token_counts
from vision_servers import STEM, TAIL, ask, keeps_states, start_vision, with_images

# Tokens of which answers consist, so that some drafts hold and some do not.
FEW = (10, 11, 12)


@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        *(wide("qwen3-vl", 16), wide("qwen2.5-vl", 1), wide("qwen2-vl", 1)),
        *(wide("qwen3.5", 1), wide("qwen3.5", 16), wide("qwen3.5-moe", 1), wide("qwen3-vl-moe", 1)),
        *(wide("glm-4.1v", 16), wide("glm-4.5v", 1), wide("mistral-small-3", 16)),
        *(wide("internvl", 1), wide("kimi-k2.5", 16), wide("gemma-3", 1), wide("gemma-4", 16)),
    ],
)
def test_logits(serve, probed, vision_model, family, page_size):
    """Prevents wrong positions of drafted tokens after an image and a round, and K/V of accepted ones, or of the image,
    that a round loses."""
    model = vision_model(family)
    client, steps = start_vision(probed, model, *NGRAM, *PAGES[page_size])
    text, image = model.with_image(STEM, TAIL), model.picture(1)
    ids, account = Accounts.of(model).of_prompt(text, image)
    schedule = "overlap off" if keeps_states(family) and page_size == 1 else "overlap"
    # As many as five rounds of windows take, and as a draft of Qwen2-VL's that holds as a whole.
    tokens = 460 if account.window or family == "qwen2-vl" else 300
    answer = answer_by_account(
        *(client, steps, account, page_size, schedule, ids, tokens, FEW),
        flush=False,
        ask=lambda tokens, **sampling: ask(client, [text], [image], tokens, **sampling)[0],
        others=[by_token_counts(account)] if len(account.positions) > 1 else [],
    )
    assert answer.rounds >= 5
    # Drafts of which none holds, and of which all do.
    assert {1, DRAFTED} <= set(answer.accepted)
    serve.stop(client)


@pytest.mark.wide
def test_bit_identical_below_the_trigger(serve, vision_model):
    """Prevents compression from changing an answer after an image, a log-probability or an acceptance before it has
    evicted."""
    model = vision_model("qwen2.5-vl")
    ours, theirs = (
        ask(client, [model.with_image(STEM, TAIL)], [model.picture(1)], BUDGET + INTERVAL, **favouring(FEW))[0]
        for client in (start_vision(serve, model, *NGRAM, *PAGES[1], compressed=each) for each in (True, False))
    )
    assert compression(ours)["rounds"] == 0
    for name in ("output_token_logprobs", "output_top_logprobs", "cached_tokens", "spec_num_correct_drafts"):
        assert ours["meta_info"][name] == theirs["meta_info"][name], name
    assert ours["meta_info"]["spec_num_correct_drafts"] > 0


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3.5"])
def test_storm(serve, vision_model, family):
    """Prevents slots for drafts, states or images that are lost or owned twice where requests with images and without
    are aborted, retracted and compacted while they are prefilled."""
    model = vision_model(family)
    client = start_vision(serve, model, *NGRAM, *PAGES[16], "--max-total-tokens", "1536", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 1, 30, (24, BUDGET), 1500, fields=with_images(model), favoured=FEW)
    assert_withstood(client, finished, 30)
    serve.stop(client)
