"""Servers of models that take images, and requests to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import requests

from family_servers import STATE_ENV, STATE_FLAGS, WITH_BUFFER, WITHOUT_BUFFER
from harness import KEYS_ALONE, REFERENCE, Client, compression, greedy, prompt, served_logprobs, unused_architectures
from oracle import TOLERANCE
from vision_account import Accounts, ScoredByTokenCounts, VisionOracle, by_token_counts, encoded
from vision_families import VISION_FAMILIES, VisionModel

ANSWER = 280


def keeps_states(family: str) -> bool:
    return family.startswith("qwen3.5")


def words(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


STEM, TAIL, OTHER = (words(prompt(seed, length)) for seed, length in ((31, 24), (32, 30), (33, 37)))


def start_vision(
    serve: Callable, model: VisionModel, *flags: str, env: dict[str, str] | None = None, compressed: bool = True
) -> Any:
    """What `serve`, or `probed`, returns of a server of the model."""
    family = model.family
    env = {"SGLANG_DISABLED_MODEL_ARCHS": unused_architectures(*model.modules), **(env or {})}
    flags = (*flags, *VISION_FAMILIES[family].flags)
    if compressed and VISION_FAMILIES[family].window:
        flags += ("--triattention-budget", str(model.budget), "--triattention-recent", str(model.recent))
    if keeps_states(family):
        kept = WITH_BUFFER if "16" in flags else WITHOUT_BUFFER
        flags, env = (*flags, "--attention-backend", REFERENCE, *STATE_FLAGS, *kept), {**STATE_ENV, **env}
    more = {"env": env, "model": model, "tokenizer": True, "compressed": compressed}
    return serve(*flags, *(KEYS_ALONE if compressed else ()), **more)


def ask(
    client: Client, texts: list[str], images: list, tokens: int | Sequence[int] = ANSWER, **sampling: Any
) -> list[dict]:
    """Sends texts in one HTTP request, each with its image or None; `tokens` are those of all answers, or of each."""
    data = [None if image is None else [encoded(image)] for image in images]
    same = isinstance(tokens, int)
    asked = greedy(tokens, **sampling) if same else [greedy(each, **sampling) for each in tokens]
    return _asked(client, texts, data, asked)


def ask_each(client: Client, texts: list[str], images: list, tokens: int = ANSWER) -> list[dict]:
    """Sends texts at once, each in an HTTP request of its own."""

    def one(text: str, image: Any) -> dict:
        return _asked(client, text, None if image is None else encoded(image), greedy(tokens))

    with ThreadPoolExecutor(len(texts)) as pool:
        return list(pool.map(one, texts, images))


def _asked(client: Client, text: Any, image_data: Any, sampling: Any) -> Any:
    asked = {"text": text, "image_data": image_data, "sampling_params": sampling}
    response = client.post("/generate", return_logprob=True, top_logprobs_num=5, **asked)
    assert response.status_code == 200, response.text
    return response.json()


def assert_prompts_are_compacted_together(
    model: VisionModel, client: Client, page_size: int, asking: Callable[..., list[dict]] = ask
) -> None:
    """Holds the answers to two prompts with an image and one without to accounts that other servers would not meet.

    Args:
        asking: sends texts with images, as `ask` does.
    """
    empty(client)
    accounts, images = Accounts.of(model), [model.picture(1), model.picture(2)]
    texts = [model.with_image(STEM, TAIL), model.with_image(STEM, TAIL), f"{STEM} {OTHER}"]
    pictures = [*images, None]
    asking(client, [STEM], [None], 1)
    for asked, image, response in zip(texts, pictures, asking(client, texts, pictures), strict=True):
        ids, oracle = accounts.of_prompt(asked, image)
        report = compression(response)
        assert response["meta_info"]["prompt_tokens"] == len(ids)
        # With pages, states are kept for the tree after every 64 tokens.
        cached = 0 if keeps_states(model.family) and page_size > 1 else 24 - 24 % page_size
        # The first image's prompt may have been prefilled: the text before the second image is the same.
        shared = 24 if image is None else text_before_image(ids)
        assert cached <= response["meta_info"]["cached_tokens"] <= shared
        frozen = len(ids) - len(ids) % page_size
        assert report["frozen_length"] == frozen
        error, rounds = error_of(oracle, ids, frozen, response)
        assert report["rounds"] == rounds >= 5
        assert error < TOLERANCE
        # The same comparison must fail for other servers, or this test would prove nothing.
        others = [replace(oracle, budget=10_000)]
        if image is not None and len(oracle.positions) > 1:
            others += [by_token_counts(oracle), ScoredByTokenCounts(**vars(oracle))]
        elif image is not None:
            others.append(accounts.of_prompt(asked, model.picture(3))[1])
        assert min(error_of(other, ids, frozen, response)[0] for other in others) > 50 * TOLERANCE
    empty(client)


def empty(client: Client) -> None:
    """Flushes the server, whose slots must then all be free.

    With Mistral-Small-3, SGLang 0.5.23 answers with an error once it has flushed, for a cache that it does not have.
    """
    response = requests.post(f"{client.url}/flush_cache?timeout=30", timeout=60)
    assert response.status_code in (200, 500), response.text
    client.assert_alive()
    assert client.slots_in_use() == 0


def text_before_image(ids: list[int]) -> int:
    """Tokens before the image's own, all of which have one id."""
    return ids.index(max(set(ids), key=ids.count))


def error_of(oracle: VisionOracle, ids: list[int], frozen: int, response: dict, **options: Any) -> tuple[float, int]:
    """Largest difference between a served log-probability and the account's, and the account's rounds."""
    expected, rounds = oracle.logprobs(ids + response["output_ids"][:-1], len(ids), frozen, **options)
    values, tokens = served_logprobs(response)
    return (expected.gather(1, tokens) - values).abs().max().item(), rounds


def with_images(model: VisionModel) -> Callable[[list[int], random.Random], dict[str, Any]]:
    """The `fields` of a storm in which most prompts have an image."""

    def fields(ids: list[int], rng: random.Random) -> dict[str, Any]:
        if len(ids) > 400 or rng.random() < 0.3:
            return {"text": words(ids)}
        place = rng.randrange(len(ids))
        picture = encoded(model.picture(rng.randrange(3)))
        return {"text": model.with_image(words(ids[:place]), words(ids[place:])), "image_data": picture}

    return fields
