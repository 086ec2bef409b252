"""Servers of models that take images, and requests to them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from family_servers import STATE_ENV, STATE_FLAGS, WITH_BUFFER, WITHOUT_BUFFER
from harness import KEYS_ALONE, REFERENCE, Client, greedy, unused_architectures
from vision_account import encoded
from vision_families import VISION_FAMILIES, VisionModel

ANSWER = 280


def keeps_states(family: str) -> bool:
    return family.startswith("qwen3.5")


def words(ids: list[int]) -> str:
    return " ".join(f"w{token}" for token in ids)


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


def ask(client: Client, texts: list[str], images: list, tokens: int = ANSWER, **sampling) -> list[dict]:
    """Sends texts in one HTTP request, each with its image or None."""
    response = client.post(
        "/generate",
        text=texts,
        image_data=[None if image is None else [encoded(image)] for image in images],
        sampling_params=greedy(tokens, **sampling),
        return_logprob=True,
        top_logprobs_num=5,
    )
    assert response.status_code == 200, response.text
    return response.json()


def with_images(model: VisionModel) -> Callable[[list[int], random.Random], dict[str, Any]]:
    """The `fields` of a storm in which most prompts have an image."""

    def fields(ids: list[int], rng: random.Random) -> dict[str, Any]:
        if len(ids) > 400 or rng.random() < 0.3:
            return {"text": words(ids)}
        place = rng.randrange(len(ids))
        picture = encoded(model.picture(rng.randrange(3)))
        return {"text": model.with_image(words(ids[:place]), words(ids[place:])), "image_data": picture}

    return fields
