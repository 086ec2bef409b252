"""Answers of models of `families` without compression, held to those of transformers on the same tokens."""

from __future__ import annotations

import torch

from families import WINDOW
from harness import Client, prompt, served_logprobs
from oracle import TOLERANCE
from tiny_model import TinyModel

ANSWER = 110
STEM = 2 * WINDOW + 9
DECLINED = {"triattention": {"enabled": False}}


@torch.no_grad()
def worst(model: torch.nn.Module, ids: list[int], response: dict) -> float:
    """Largest difference between a served log-probability and the model's."""
    everything = ids + response["output_ids"][:-1]
    logits = model(input_ids=torch.tensor([everything])).logits[0, len(ids) - 1 :]
    values, tokens = served_logprobs(response)
    assert len(values) == ANSWER
    return (logits.float().log_softmax(-1).gather(1, tokens) - values).abs().max().item()


def without_windows(model: torch.nn.Module) -> None:
    model.config.sliding_window = 8192


def without_caps(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.attn_logit_softcapping = None


def without_sinks(model: torch.nn.Module) -> None:
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e4)


def without_decay(model: torch.nn.Module) -> None:
    for layer in model.model.layers[:-1]:
        layer.linear_attn.A_log.data.fill_(-20)


PECULIARITIES = {
    "gemma2": [without_windows, without_caps],
    "gemma3": [without_windows],
    "gpt-oss": [without_windows, without_sinks],
    "qwen3-next": [without_decay],
}


def assert_plain_answers(client: Client, model: TinyModel, family: str, chunk: int) -> None:
    """Asks a server that compresses for answers without, and holds them to those of transformers.

    Args:
        chunk: tokens of a prompt that the server prefills at once.
    """
    stem, long = prompt(5, STEM), prompt(6, 2 * chunk + 11)
    branches = [stem + prompt(7, 20), stem + prompt(8, 33)]
    answers = [client.generate(long, ANSWER, logprobs=True, custom_params=DECLINED)]
    client.generate(stem, 1, custom_params=DECLINED)
    answers += client.generate_all(branches, ANSWER, logprobs=True, custom_params=DECLINED)
    assert all(answer["meta_info"]["cached_tokens"] > WINDOW for answer in answers[1:])

    pairs = list(zip([long, *branches], answers, strict=True))
    reference = model.load()
    assert max(worst(reference, *pair) for pair in pairs) < TOLERANCE
    for take_away in PECULIARITIES.get(family, []):
        # The same comparison must fail for a model without it, or the test would prove nothing.
        other = model.load()
        take_away(other)
        assert min(worst(other, *pair) for pair in pairs) > 50 * TOLERANCE, take_away.__name__
    client.flush()
