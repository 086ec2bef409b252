"""Vision-language models: positions, kept sets and attention of image and text prompts against the oracle."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from disaggregated_servers import RETRACT, Pairs
from forked_servers import run_command
from harness import (
    KEYS_ALONE,
    POOL,
    STRICT,
    Client,
    compression,
    greedy,
    prompt,
    served_logprobs,
    two_cores,
    unused_architectures,
)
from oracle import TOLERANCE
from sets import wide
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.stats.file import load_stats
from storm import FLAGS, RETRACTING, retractions, storm
from tiny_model import save_random_stats
from vision_account import Accounts, by_token_counts, encoded
from vision_families import VisionModel, build_vision_model
from vision_servers import (
    ANSWER,
    STEM,
    TAIL,
    ask,
    assert_prompts_are_compacted_together,
    empty,
    error_of,
    keeps_states,
    start_vision,
    with_images,
    words,
)
from word_tokenizer import text


@pytest.fixture
def serve_vision(serve, vision_model):
    """`serve_vision(family, *flags, env=..., compressed=...)` returns the model and the Client of a server."""

    def start(
        family: str, *flags: str, env: dict[str, str] | None = None, compressed: bool = True
    ) -> tuple[VisionModel, Client]:
        model = vision_model(family)
        return model, start_vision(serve, model, *flags, env=env, compressed=compressed)

    return start


@pytest.mark.parametrize(
    ("family", "page_size"),
    [
        *(wide("qwen2.5-vl", 1), wide("qwen2.5-vl", 16), wide("qwen2-vl", 1), ("qwen3-vl", 16)),
        *(wide("glm-4.1v", 16), wide("glm-4.5v", 1), wide("mistral-small-3", 16)),
        *(wide("internvl", 1), wide("kimi-k2.5", 16)),
        *(wide("qwen3.5", 1), wide("qwen3.5", 16), wide("qwen3.5-moe", 1), wide("gemma-3", 16)),
        *(wide("gemma-4", 1), wide("qwen3-vl-moe", 1)),
    ],
)
def test_logits_of_image_and_text_prompts_compacted_together(serve_vision, family, page_size):
    """Prevents wrong positions after an image and a round, a kept set chosen for another position, image tokens
    that are evicted, and prompts whose images are taken for one another's in the tree."""
    model, client = serve_vision(family, "--page-size", str(page_size))
    assert_prompts_are_compacted_together(model, client, page_size)


@pytest.mark.wide
@pytest.mark.parametrize(("family", "page_size"), [("qwen2.5-vl", 16), ("qwen3.5", 1)])
def test_logits_of_images_in_pipeline_stages(serve_vision, family, page_size):
    """Prevents a stage that has no encoder from turning and scoring what follows an image by counts of tokens."""
    model, client = serve_vision(family, "--page-size", str(page_size), "--pp-size", "2", env=two_cores())
    assert_prompts_are_compacted_together(model, client, page_size)


@pytest.mark.wide
def test_logits_of_images_on_a_decode_server(forkserver, vision_model, tmp_path):
    """Prevents a decode server, to which another one sends the K/V of an image, from turning and scoring what follows
    by counts of tokens."""
    pairs, model = Pairs(forkserver, tmp_path), vision_model("qwen2.5-vl")
    env = {"SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*model.modules)}
    try:
        client = pairs("--page-size", "16", *KEYS_ALONE, model=model, env={**env, **RETRACT}, tokenizer=True)
        image, asked = model.picture(1), model.with_image(STEM, TAIL)
        ids, oracle = Accounts.of(model).of_prompt(asked, image)
        # The router takes one text for each request.
        body = {"image_data": encoded(image), "sampling_params": greedy(ANSWER)}
        response = client.post("/generate", text=asked, return_logprob=True, top_logprobs_num=5, **body).json()
        error, rounds = error_of(oracle, ids, len(ids) - len(ids) % 16, response)
        assert compression(response)["rounds"] == rounds >= 5
        assert error < TOLERANCE
        assert error_of(by_token_counts(oracle), ids, len(ids) - len(ids) % 16, response)[0] > 50 * TOLERANCE
        pairs.stop(client)
    finally:
        pairs.stop_all()


def chunked(family: str) -> tuple[tuple[str, ...], int]:
    """Flags of a server whose chunks split images, and tokens of a chunk; no fewer than are between two states."""
    chunk = 64 if keeps_states(family) else 32
    return ("--page-size", "16", "--chunked-prefill-size", str(chunk)), chunk


COMPACT = {"triattention": {"prompt": "compact"}}


@pytest.mark.parametrize(
    "family", ["qwen2.5-vl", *map(wide, ("qwen3.5", "gemma-3", "gemma-4", "internvl", "kimi-k2.5"))]
)
def test_only_text_prompts_are_compacted(serve_vision, family):
    """Prevents wrong positions in a prompt that is prefilled onto a row that rounds shortened, an image that is split
    over chunks or evicted, and an image's K/V served for another image's."""
    flags, chunk = chunked(family)
    model, client = serve_vision(family, *flags)
    empty(client)
    accounts = Accounts.of(model)
    long = words(prompt(41, 300))
    ids, oracle = accounts.of_prompt(long)
    if oracle.window:
        # Rounds evict whole pages then.
        oracle = replace(oracle, round_to=16)
    (response,) = ask(client, [long], [None], 120, custom_params=COMPACT)
    assert compression(response)["frozen_length"] == 4
    error, rounds = error_of(oracle, ids, 4, response, chunk=chunk)
    assert compression(response)["rounds"] == rounds >= 7
    assert error < TOLERANCE

    around, found = model.with_image(STEM, TAIL), (0, 16, 1000)
    if keeps_states(family):
        # So that the tree keeps a state within the image.
        around, found = model.with_image(words(prompt(34, 52)), words(prompt(35, 34))), (0, 0, 64)
    # Again after another image, whose prompt differs from the image's first token on.
    for seed, cached in zip((3, 4, 3), found, strict=True):
        image = model.picture(seed)
        ids, oracle = accounts.of_prompt(around, image)
        (response,) = ask(client, [around], [image], 150, custom_params=COMPACT)
        # A prompt's last token is always computed.
        assert response["meta_info"]["cached_tokens"] == min(cached, (len(ids) - 1) // 16 * 16)
        frozen = len(ids) - len(ids) % 16
        assert compression(response)["frozen_length"] == frozen
        error, rounds = error_of(oracle, ids, frozen, response)
        assert compression(response)["rounds"] == rounds >= 2
        assert error < TOLERANCE
    empty(client)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "fields", "message"),
    [
        ({"conversation": "c"}, {}, "conversation does not work with images"),
        ({}, {"video_data": "none.mp4"}, "The prompt has video"),
    ],
)
@pytest.mark.parametrize("family", ["qwen2.5-vl", *map(wide, ("qwen3.5", "internvl", "kimi-k2.5"))])
def test_what_is_refused_with_images(serve_vision, family, stream, asked, fields, message):
    """Prevents a resumed row without its images, and rounds on media that no test covers."""
    model, client = serve_vision(family, *chunked(family)[0])
    response = client.post(
        "/generate",
        text=model.with_image(STEM, TAIL),
        image_data=encoded(model.picture(1)),
        sampling_params=greedy(8, custom_params={"triattention": asked}),
        stream=stream,
        **fields,
    )
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3.5"])
def test_aborted_image_requests(serve_vision, family):
    """Prevents slots or images of an aborted, compacted request from being kept."""
    model, client = serve_vision(family, *chunked(family)[0])
    before = client.totals()["rounds"]

    def one(number: int) -> dict:
        response = client.post(
            "/generate",
            rid=f"image-{number}",
            text=model.with_image(STEM, words(prompt(50 + number, 20 + number))),
            image_data=encoded(model.picture(number % 2)),
            sampling_params=greedy(2000),
        )
        return response.json()["meta_info"]["finish_reason"]

    with ThreadPoolExecutor(4) as pool:
        reasons = pool.map(one, range(4))
        while client.totals()["rounds"] < before + 8:
            time.sleep(0.2)
        for number in range(4):
            client.post("/abort_request", rid=f"image-{number}")
        assert {reason["type"] for reason in reasons} == {"abort"}
    empty(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "page_size"),
    [("qwen3-vl", 1), ("qwen3-vl", 16), ("qwen3.5", 1), ("qwen3.5", 16), ("internvl", 1)],
)
def test_retracted_image_requests(serve_vision, family, page_size):
    """Prevents a retracted request from resuming without its image, or at positions of the row that it lost."""
    model, client = serve_vision(
        family,
        *("--page-size", str(page_size)),
        env={
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "40",
            "SGLANG_TEST_RETRACT_NO_PREFILL_BS": "9",
        },
    )
    texts = [model.with_image(STEM, words(prompt(60 + number, 25))) for number in range(4)]
    images = [model.picture(number % 2) for number in range(4)]
    responses = ask(client, texts, images, 300)
    assert sum(response["meta_info"]["num_retractions"] for response in responses) > 4
    for response in responses:
        report = compression(response)
        assert response["meta_info"]["completion_tokens"] == 300
        assert report["logical_length"] == 24 + 26 + 25 + 299
        assert report["logical_length"] - report["physical_length"] == report["evicted_tokens"]
        assert report["physical_length"] <= report["frozen_length"] + 64 + 32
    empty(client)
    if page_size > 1:
        return
    # The first round after the last retraction evicts all that was prefilled again down to the budget.
    again = [report["evicted_tokens"] - 32 * (report["rounds"] - 1) + 64 - 1 for report in map(compression, responses)]
    # Whether a round comes that is due when an answer ends depends on what else runs then.
    place = max((one for one in range(4) if (300 - again[one]) % 32 != 2), key=again.__getitem__)
    done, response = again[place], responses[place]
    assert done > 96
    ids, oracle = Accounts.of(model).of_prompt(texts[place], images[place])
    expected, rounds = oracle.logprobs(ids + response["output_ids"][:-1], len(ids) + done, len(ids))
    values, tokens = served_logprobs(response)
    assert compression(response)["rounds"] == rounds, (done, compression(response))
    assert (expected.gather(1, tokens[done:]) - values[done:]).abs().max() < TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2.5-vl", "qwen3.5", "gemma-3", "gemma-4", "internvl", "kimi-k2.5"])
def test_answers_and_storm(serve_vision, family):
    """Prevents answers to images below the budget, or prefix hits, from differing from plain SGLang's, and leaks of
    slots, states or images."""
    flags = ("--page-size", "16", "--max-total-tokens", "1536", *FLAGS)
    model, client = serve_vision(family, *flags, env=RETRACTING)
    _, plain = serve_vision(family, *flags, env=RETRACTING, compressed=False)
    stem = words(prompt(36, 70))
    texts = [model.with_image(stem, words(prompt(37 + number, 20))) for number in range(3)]
    for server in (client, plain):
        empty(server)
    # The last two have the image of the first, and another.
    # A pool of window layers holds what follows the end of a chunk alone.
    found = (0, 64, 64) if keeps_states(family) else (0, 96, 0 if family == "gemma-4" else 64)
    for text_, seed, cached in zip(texts, (5, 5, 6), found, strict=True):
        ours, theirs = (ask(server, [text_], [model.picture(seed)], model.budget)[0] for server in (client, plain))
        assert compression(ours)["rounds"] == 0
        assert ours["meta_info"]["cached_tokens"] == cached
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]

    _, finished = storm(client, 1, 30, (model.recent + 1, model.budget), 1500, fields=with_images(model))
    assert len(finished) > 15
    assert retractions(finished) > 0
    assert client.totals()["rounds"] > 10
    # A prompt with an image that hits the radix tree, states included, answers as one that is prefilled.
    longer = [model.with_image(stem, words(prompt(37 + number % 3, 20 + number))) for number in range(6)]
    images = [model.picture(5 + number % 2) for number in range(6)]
    found = ask(client, longer, images, 2)
    assert max(answer["meta_info"]["cached_tokens"] for answer in found) >= 64
    empty(client)
    for one, other in zip(found, ask(client, longer, images, 2), strict=True):
        (ours, tokens), (theirs, same) = served_logprobs(one), served_logprobs(other)
        assert (tokens == same).all()
        assert (ours - theirs).abs().max() < TOLERANCE
    empty(client)


@pytest.mark.wide
@pytest.mark.parametrize("family", ["qwen2.5-vl", "glm-4.1v", "mistral-small-3", "gemma-3"])
def test_both_engines_measure_the_language_model(forkserver, vision_model, tmp_path, family):
    """Prevents queries that are turned back by other positions or dims, and a vision encoder's among them."""
    model = vision_model(family)
    (tmp_path / "text.txt").write_text(text(1, 3000))
    arguments = [
        "calibrate",
        "--engine",
        "sglang",
        "--model",
        str(model.path),
        "--out",
        str(tmp_path / "s.safetensors"),
    ]
    arguments += ["--device", "cpu", "--data", str(tmp_path / "text.txt"), "--window", "512"]
    env = {**STRICT, "SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*model.modules)}
    ended = run_command(forkserver, tmp_path, [*arguments, "--", "--max-total-tokens", str(POOL)], env)
    assert ended.code == 0, ended.output[-3000:]
    measured = load_stats(tmp_path / "s.safetensors")
    expected = calibrate(str(model.path), str(tmp_path / "text.txt"), window=512, device="cpu", progress=False)
    assert (measured.token_count, measured.fingerprint) == (expected.token_count, expected.fingerprint)
    assert measured.fingerprint is not None
    assert (measured.rope.style, measured.rope.rotary_dim) == (expected.rope.style, expected.rope.rotary_dim)
    for name in ("mean", "abs_mean"):
        one, other = getattr(measured, name), getattr(expected, name)
        assert (one - other).norm() / other.norm() < 1e-2
    rolled = expected.mean.roll(1, dims=1)
    assert (measured.mean - rolled).norm() / rolled.norm() > 0.1, "the heads are all equal, so nothing was compared"


@pytest.mark.wide
def test_images_are_refused(serve, tmp_path):
    """Prevents rounds after an image at a model of which text alone is covered, and a refusal that comes once a stream
    has begun."""
    model = build_vision_model(tmp_path, "qwen3.5-moe")
    file = model.path / "config.json"
    # A class of SGLang's that adds nothing to this model's.
    other = {"architectures": ["InternS2PreviewForConditionalGeneration"]}
    file.write_text(json.dumps({**json.loads(file.read_text()), **other}))
    stats = load_stats(model.stats)
    save_random_stats(model, stats.rope, stats.layers, (True,) * len(stats.layers))
    env = {"SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*model.modules, "interns2preview")}
    client = start_vision(serve, model, env=env)
    asked = {"image_data": [encoded(model.picture(1))], "sampling_params": greedy(4)}
    for stream in (False, True):
        response = client.post("/generate", text=model.with_image("w5", "w6"), stream=stream, **asked)
        assert response.status_code == 400
        assert "compression covers only text on this server" in response.text
    assert client.post("/generate", text="w5", sampling_params=greedy(4)).status_code == 200
