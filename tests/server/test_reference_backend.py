"""Plain SGLang through the CPU platform's reference attention backend, against `transformers` on the same tokens."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, WINDOW, build_family
from harness import only_models, prompt, served_logprobs
from oracle import TOLERANCE

CHUNK, ANSWER = 96, 110
STEM = 2 * WINDOW + 9
# The others are served by torch_native unless they are told otherwise.
CHOSEN_BY_ITSELF = {"gemma2", "gpt-oss", "deepseek-v3"}
CASES = [
    ("llama", 1),
    ("gemma2", 16),
    ("gemma3", 1),
    ("gpt-oss", 1),
    ("gpt-oss", 16),
    ("deepseek-v3", 16),
    ("qwen3-moe", 1),
    ("glm-4.5", 16),
    ("qwen3-next", 1),
    ("lfm2", 1),
    ("qwen3.5", 1),
    ("falcon-h1", 1),
    ("granite-4-h", 1),
    ("nemotron-h", 1),
]


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


@pytest.mark.parametrize(("family", "page_size"), CASES)
def test_answers_equal_those_of_transformers(serve, tmp_path, family, page_size):
    """Prevents wrong windows, slots, sinks, caps and latents, in prefill by chunks, behind a cached prefix, in decode
    and in batches, and a platform that leaves such a model to a backend that cannot serve it."""
    model = build_family(tmp_path, family)
    flags = ["--chunked-prefill-size", str(CHUNK), "--page-size", str(page_size)]
    if family not in CHOSEN_BY_ITSELF:
        flags += ["--attention-backend", "torch_reference"]
    env = only_models(FAMILIES[family].module)
    # The model's own; SGLang keeps the inputs of convolutions in bfloat16 otherwise.
    env["SGLANG_MAMBA_CONV_DTYPE"] = "float32"
    client = serve(*flags, env=env, compressed=False, model=model)
    assert client.setting("attention_backend") == "torch_reference"

    stem, long = prompt(5, STEM), prompt(6, 2 * CHUNK + 11)
    branches = [stem + prompt(7, 20), stem + prompt(8, 33)]
    answers = [client.generate(long, ANSWER, logprobs=True)]
    client.generate(stem, 1)
    answers += client.generate_all(branches, ANSWER, logprobs=True)
    serve.stop(client)
    assert all(answer["meta_info"]["cached_tokens"] > WINDOW for answer in answers[1:])

    pairs = list(zip([long, *branches], answers, strict=True))
    reference = model.load()
    error = max(worst(reference, *pair) for pair in pairs)
    assert error < TOLERANCE
    for take_away in PECULIARITIES.get(family, []):
        # The same comparison must fail for a model without it, or the test would prove nothing.
        other = model.load()
        take_away(other)
        assert min(worst(other, *pair) for pair in pairs) > 50 * TOLERANCE, take_away.__name__
