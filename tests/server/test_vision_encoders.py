"""Images that another server has encoded (`--language-only`): answers, refusals and failures."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

import server
from disaggregated_servers import RETRACT, DisaggregatedServers
from encoder_servers import ADDRESS, encoded_by, running_encoder
from harness import (
    BUDGET,
    KEYS_ALONE,
    STRICT,
    Client,
    assert_pool_is_whole,
    compressed_args,
    compression,
    greedy,
    only_models,
    two_cores,
)
from measured_statistics import assert_ranks_measure_as_one
from oracle import TOLERANCE
from sets import wide
from storm import FLAGS, RETRACTING, retractions, storm
from vision_account import Accounts, by_token_counts, encoded
from vision_families import VisionModel
from vision_servers import (
    STEM,
    TAIL,
    ask_each,
    assert_prompts_are_compacted_together,
    empty,
    error_of,
    start_vision,
    with_images,
)

TO_SCHEDULER, TO_TOKENIZER = "zmq_to_scheduler", "zmq_to_tokenizer"


@pytest.fixture
def serve_encoded(forkserver, serve, vision_model, tmp_path):
    """`serve_encoded(family, backend, *flags, env=...)` returns the model, the Client of a server with its language
    model, and the server that encodes images for it."""
    with ExitStack() as stack:

        def start(
            family: str, backend: str, *flags: str, env: dict[str, str] | None = None
        ) -> tuple[VisionModel, Client, server.Server]:
            model = vision_model(family)
            encoder = stack.enter_context(running_encoder(forkserver, model, tmp_path / "encoder.log", backend))
            client = start_vision(serve, model, *flags, *encoded_by(encoder, backend), env={**ADDRESS, **(env or {})})
            stack.callback(serve.stop, client)
            return model, client, encoder

        yield start


@pytest.mark.parametrize(
    ("family", "backend", "page_size", "flags"),
    [
        ("qwen2.5-vl", TO_SCHEDULER, 16, ()),
        wide("qwen2.5-vl", TO_SCHEDULER, 1, ("--tp-size", "2")),
        wide("qwen2.5-vl", TO_SCHEDULER, 16, ("--pp-size", "2")),
        wide("qwen3-vl", TO_TOKENIZER, 1, ()),
        wide("qwen3.5", TO_SCHEDULER, 1, ()),
    ],
)
def test_logits(serve_encoded, family, backend, page_size, flags):
    """Prevents wrong positions after an image that arrives encoded and a round, image tokens that are evicted, and
    prompts whose images are taken for one another's in the tree."""
    env = two_cores() if flags else {}
    model, client, _ = serve_encoded(family, backend, "--page-size", str(page_size), *flags, env=env)
    assert_prompts_are_compacted_together(model, client, page_size, ask_each)


def test_a_conversation_is_refused(serve_encoded):
    """Prevents a row that a conversation resumes without its images, though these arrive after the request's check."""
    model, client, _ = serve_encoded("qwen2.5-vl", TO_SCHEDULER, "--page-size", "16", "--chat-template", "qwen2-vl")
    named, picture = {"triattention": {"conversation": "c"}}, encoded(model.picture(1))
    text = {"text": model.with_image(STEM, TAIL), "image_data": picture, "sampling_params": greedy(8)}
    text["sampling_params"]["custom_params"] = named
    url = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}}
    message = {"role": "user", "content": [url, {"type": "text", "text": TAIL}]}
    chat = {"model": "m", "messages": [message], "max_tokens": 8, "custom_params": named}
    for path, body in (("/generate", text), ("/v1/chat/completions", chat)):
        for stream in (False, True):
            refused = client.post(path, stream=stream, **body)
            assert refused.status_code == 400, refused.text
            assert "conversation does not work with images" in refused.text
    answer = client.post("/v1/chat/completions", **{**chat, "custom_params": {}, "max_tokens": 200, "ignore_eos": True})
    assert answer.json()["usage"]["completion_tokens"] == 200
    assert client.totals()["rounds"] > 2
    empty(client)


@pytest.mark.wide
def test_an_encoder_that_is_gone(serve_encoded):
    """Prevents slots that a request keeps whose images never come, and a server that ends for it.

    Where images are sent to its scheduler, SGLang's server ends, compressed or not.
    """
    model, client, encoder = serve_encoded("qwen2.5-vl", TO_TOKENIZER, "--page-size", "16")
    server.stop_process(encoder.process, grace_s=0)
    text, image = model.with_image(STEM, TAIL), encoded(model.picture(1))
    failed = client.post("/generate", text=text, image_data=image, sampling_params=greedy(8))
    assert failed.status_code == 503, failed.text
    (answer,) = ask_each(client, [STEM], [None])
    assert compression(answer)["rounds"] > 1
    empty(client)


@pytest.mark.wide
def test_first_launch(forkserver, serve, vision_model, tmp_path):
    """Prevents a launch without the encoder from measuring other queries than one with it, or none."""
    model = vision_model("qwen2.5-vl")

    def start(*flags: str, env: dict[str, str]) -> Client:
        return start_vision(serve, model, *flags, env={**env, **ADDRESS})

    with running_encoder(forkserver, model, tmp_path / "encoder.log", TO_SCHEDULER) as encoder:
        assert_ranks_measure_as_one(start, serve.stop, encoded_by(encoder, TO_SCHEDULER), BUDGET, tmp_path)


@pytest.mark.wide
def test_logits_on_a_decode_server(forkserver, vision_model, tmp_path):
    """Prevents a decode server, to which another one sends the K/V of an image that a third has encoded, from turning
    and scoring what follows by counts of tokens."""
    model, pages = vision_model("qwen2.5-vl"), ("--page-size", "16")
    image, text = model.picture(1), model.with_image(STEM, TAIL)
    with ExitStack() as stack:
        encoder = stack.enter_context(running_encoder(forkserver, model, tmp_path / "encoder.log", TO_SCHEDULER))
        servers = DisaggregatedServers(forkserver, model, tmp_path, stack, tokenizer=True)
        env = {**STRICT, **only_models(*model.modules), **ADDRESS}
        prefill = servers.prefill([*pages, *encoded_by(encoder, TO_SCHEDULER)], env)
        compressing = compressed_args(model, *KEYS_ALONE, *pages, *encoded_by(encoder, TO_SCHEDULER))
        client = servers.decode(compressing, {**env, **RETRACT}, prefill)
        (answer,) = ask_each(client, [text], [image])
        ids, account = Accounts.of(model).of_prompt(text, image)
        frozen = len(ids) - len(ids) % 16
        error, rounds = error_of(account, ids, frozen, answer)
        assert compression(answer)["rounds"] == rounds >= 5
        assert error < TOLERANCE
        assert error_of(by_token_counts(account), ids, frozen, answer)[0] > 50 * TOLERANCE
        assert_pool_is_whole(client)
        assert_pool_is_whole(prefill)


@pytest.mark.wide
def test_storm(serve_encoded):
    """Prevents leaks of slots where a request is aborted, or retracted, that waits or has waited for its images."""
    flags = ("--page-size", "16", "--max-total-tokens", "1536", *FLAGS)
    model, client, _ = serve_encoded("qwen2.5-vl", TO_SCHEDULER, *flags, env=RETRACTING)
    _, finished = storm(client, 1, 30, (model.recent + 1, model.budget), 1500, fields=with_images(model))
    assert len(finished) > 15
    assert retractions(finished) > 0
    assert client.totals()["rounds"] > 10
    empty(client)
