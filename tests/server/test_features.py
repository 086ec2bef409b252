"""SGLang features that change what a request computes or may say, on requests that outgrow their budget."""

from __future__ import annotations

import json
import re
from pathlib import Path

import prepare_model
import pytest
import torch
from safetensors.torch import save_file

from harness import STRICT, Client, TinyModel, compression, prompt
from oracle import Oracle, oracle_of
from server import device_args, running_server

RANK, ALPHA = 4, 8


def write_adapter(tiny: TinyModel, folder: Path) -> dict[str, torch.Tensor]:
    """A LoRA adapter of all attention projections; returns what it adds to each weight, by the weight's name."""
    folder.mkdir()
    settings = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    settings |= {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "base_model_name_or_path": str(tiny.path)}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    generator, tensors, added = torch.Generator().manual_seed(0), {}, {}
    for name, weight in tiny.load().named_parameters():
        if ".self_attn." not in name:
            continue
        down = torch.randn(RANK, weight.shape[1], generator=generator) * 0.1
        up = torch.randn(weight.shape[0], RANK, generator=generator) * 0.1
        stem = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{stem}.lora_A.weight": down, f"{stem}.lora_B.weight": up}
        added[name] = up @ down * (ALPHA / RANK)
    save_file(tensors, folder / "adapter_model.safetensors")
    return added


def test_lora(serve, tiny, tmp_path):
    """Prevents keys of an adapted model from being evicted by the wrong scores, or mixed up with the plain model's."""
    added = write_adapter(tiny, tmp_path / "adapter")
    client = serve("--lora-paths", f"adapter={tmp_path / 'adapter'}", "--lora-backend", "torch_native")
    ids, plain = prompt(12, 40), oracle_of(tiny)
    adapted = oracle_of(tiny)
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if name in added:
                parameter += added[name]
    for which, expected_by, other in (("adapter", adapted, plain), (None, plain, adapted)):
        response = client.post(
            "/generate", input_ids=ids, lora_path=which, return_logprob=True, top_logprobs_num=5,
            sampling_params={"max_new_tokens": 200, "temperature": 0, "ignore_eos": True},
        ).json()  # fmt: skip
        assert compression(response)["rounds"] >= 4
        assert error_of(expected_by, ids, response) < 2e-3
        assert error_of(other, ids, response) > 0.1


def error_of(oracle: Oracle, ids: list[int], response: dict) -> float:
    """Largest difference of the served top log-probabilities from the oracle's."""
    top = response["meta_info"]["output_top_logprobs"]
    values = torch.tensor([[entry[0] for entry in step] for step in top])
    tokens = torch.tensor([[entry[1] for entry in step] for step in top])
    expected, _ = oracle.logprobs(ids + response["output_ids"][:-1], len(ids), compression(response)["frozen_length"])
    return float((expected.gather(1, tokens) - values).abs().max())


@pytest.fixture(scope="module")
def smollm(tmp_path_factory):
    model, stats = prepare_model.prepare()
    args = ["--enable-triattention", "--triattention-stats", str(stats), "--triattention-budget", "64"]
    args += ["--triattention-interval", "32", "--max-total-tokens", "6144", "--sleep-on-idle", *device_args()]
    with running_server(model, args, env=STRICT, log_path=tmp_path_factory.mktemp("logs") / "log") as server:
        yield Client(server)


def test_structured_output(smollm):
    """Prevents a grammar from losing its place when tokens that it has accepted are evicted."""
    response = smollm.post(
        "/generate",
        text="Some three-letter words:",
        sampling_params={"max_new_tokens": 240, "temperature": 0.8, "regex": "([a-z]{3} [0-9]{2}, ){100}"},
    ).json()
    assert compression(response)["rounds"] >= 3
    whole = len(response["text"]) // 8 * 8
    assert re.fullmatch("([a-z]{3} [0-9]{2}, )+", response["text"][:whole])


def test_json_schema_in_a_chat(smollm):
    """Prevents an answer that breaks the schema it was promised to follow."""
    numbers = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 999}, "minItems": 60}
    schema = {"type": "object", "properties": {"numbers": numbers | {"maxItems": 60}}, "required": ["numbers"]}
    response = smollm.post(
        "/v1/chat/completions",
        model="default",
        messages=[{"role": "user", "content": "Sixty numbers, please."}],
        max_tokens=900,
        temperature=0.8,
        response_format={"type": "json_schema", "json_schema": {"name": "numbers", "schema": schema}},
    ).json()
    assert len(json.loads(response["choices"][0]["message"]["content"])["numbers"]) == 60
