"""Adapters: their requests are compressed like others, together with requests for the base model.

SGLang's LoRA pins memory, which needs an accelerator; without one, the plugin `unpinned` disables that.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import unpinned
from harness import BUDGET, INTERVAL, compression, install_plugin, prompt, python_path, served_logprobs
from oracle import TOLERANCE, Oracle, oracle_of
from tiny_model import TinyModel

RANK, SCALE = 4, 2.0
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")


def adapter_weights(tiny: TinyModel) -> dict[str, torch.Tensor]:
    """lora_A and lora_B of each projection in each layer, large enough that the adapter gives other answers."""
    generator = torch.Generator().manual_seed(5)
    found = {}
    for name, weight in tiny.load().state_dict().items():
        if name.split(".")[-2] in MODULES:
            stem = "base_model.model." + name.removesuffix(".weight")
            rows, columns = weight.shape
            found[f"{stem}.lora_A.weight"] = 0.1 * torch.randn(RANK, columns, generator=generator)
            found[f"{stem}.lora_B.weight"] = 0.1 * torch.randn(rows, RANK, generator=generator)
    return found


@pytest.fixture(scope="module")
def adapter(tiny, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": RANK * SCALE, "lora_dropout": 0.0,
        "target_modules": list(MODULES), "bias": "none", "base_model_name_or_path": str(tiny.path),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(adapter_weights(tiny), folder / "adapter_model.safetensors")
    return folder


@pytest.fixture(scope="module")
def serve_lora(serve, adapter, tmp_path_factory):
    """`serve_lora(compressed=True)` returns the Client of a server with the adapter "other"."""
    folder = tmp_path_factory.mktemp("unpinned")
    install_plugin(folder, "unpinned", Path(unpinned.__file__).read_text())
    env = {"PYTHONPATH": python_path(folder)}
    flags = ("--enable-lora", "--lora-paths", f"other={adapter}", "--lora-backend", "torch_native")
    return lambda **options: serve(*flags, env=env, **options)


@pytest.fixture(scope="module")
def adapted_oracle(tiny, adapter) -> Oracle:
    """An oracle with the base model's statistics and a model into which the adapter is merged."""
    oracle = oracle_of(tiny)
    weights, state = adapter_weights(tiny), oracle.model.state_dict()
    for name in weights:
        if "lora_A" in name:
            delta = SCALE * weights[name.replace("lora_A", "lora_B")] @ weights[name]
            state[name.removeprefix("base_model.model.").replace("lora_A.", "")] += delta
    return oracle


def test_adapter_and_base_requests_together(serve_lora, tiny, adapted_oracle):
    """Prevents rounds that mix up requests of different adapters, or score an adapter's keys as the base model's."""
    client = serve_lora()
    prompts, loras = [prompt(31, 40), prompt(31, 40), prompt(32, 21), prompt(33, 55)], [None, "other", "other", None]
    with ThreadPoolExecutor(4) as pool:
        responses = pool.map(lambda ids, lora: client.generate(ids, 200, logprobs=True, lora=lora), prompts, loras)
    base = oracle_of(tiny)
    for ids, lora, response in zip(prompts, loras, responses, strict=True):
        report = compression(response)
        assert report["frozen_length"] == len(ids)
        assert report["logical_length"] - report["physical_length"] == report["evicted_tokens"] == report["freed_slots"]
        values, tokens = served_logprobs(response)
        ours, others = (adapted_oracle, base) if lora else (base, adapted_oracle)
        everything = ids + response["output_ids"][:-1]
        expected, rounds = ours.logprobs(everything, len(ids), len(ids))
        assert report["rounds"] == rounds >= 3
        assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
        wrong, _ = others.logprobs(everything, len(ids), len(ids))
        assert (wrong.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE
    client.flush()
    assert client.slots_in_use() == 0


def test_prefixes_of_an_adapter_stay_its_own(serve_lora):
    """Prevents a frozen prefix of the base model from being served to an adapter, even after rounds."""
    client = serve_lora()
    client.flush()
    ids, tokens = prompt(41, 60), BUDGET + 2 * INTERVAL + 8
    answers = [client.generate(ids, tokens, lora=lora) for lora in (None, "other", None, "other")]
    assert {compression(answer)["rounds"] for answer in answers} == {2}
    assert [answer["meta_info"]["cached_tokens"] for answer in answers] == [0, 0, len(ids) - 1, len(ids) - 1]
    assert [answer["output_ids"] for answer in answers[:2]] == [answer["output_ids"] for answer in answers[2:]]


def test_short_adapter_requests_equal_plain_sglang(serve_lora):
    """Prevents compression from touching a request that never outgrows its budget."""
    ids, tokens = prompt(51, 30), BUDGET + INTERVAL - 1
    client = serve_lora()
    short, base = (client.generate(ids, tokens, logprobs=True, lora=lora) for lora in ("other", None))
    assert compression(short)["rounds"] == 0
    assert short["output_ids"] != base["output_ids"]
    plain = serve_lora(compressed=False).generate(ids, tokens, logprobs=True, lora="other")
    assert short["output_ids"] == plain["output_ids"]
    assert short["meta_info"]["output_top_logprobs"] == plain["meta_info"]["output_top_logprobs"]
