"""What a model's config.json says about its cache, its weights and its context."""

import pytest
import torch
import transformers

from plan_cases import LLAMA3_8B, QWEN3_8B, SMOLLM2, rows_of, shape
from sglang_triattn.model.sizes import read_sizes, weight_bytes


@pytest.mark.parametrize(
    ("config", "count"),
    [(LLAMA3_8B, 131072), (QWEN3_8B, 147456), (SMOLLM2, 30 * 3 * 64 * 2 * 2)],
    ids=["Llama-3-8B", "Qwen3-8B", "SmolLM2-135M"],
)
def test_bytes_per_token(config, count):
    """Prevents keys without values, query heads instead of KV heads, and a head_dim that the config overrides."""
    sizes = read_sizes(config)
    assert sizes.bytes_per_token("bfloat16") == count
    assert sizes.bytes_per_token("fp8_e4m3") == sizes.bytes_per_token("fp8_e5m2") == count // 2


def test_heads_split_over_ranks():
    """Prevents a GPU's share from falling below the one KV head that SGLang gives each rank."""
    sizes = read_sizes(LLAMA3_8B)
    for tp, kv_heads in ((1, 8), (2, 4), (8, 1), (16, 1)):
        sizes.check_ranks(tp)
        assert sizes.bytes_per_token("bfloat16", tp) == 32 * kv_heads * 128 * 2 * 2


@pytest.mark.parametrize(
    ("config", "count"), [(LLAMA3_8B, 8_030_261_248), (QWEN3_8B, 8_190_735_360), (SMOLLM2, 134_515_008)]
)
def test_published_parameter_counts(config, count):
    """Prevents an estimate that forgets the output head or counts a tied one twice."""
    assert read_sizes(config).parameters == count
    found = weight_bytes(read_sizes(config), config)
    assert (found.total, found.origin) == (2 * count, f"estimated: {count:,} parameters, bfloat16")


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "phi3", "granite"])
@pytest.mark.parametrize("bias", [False, True])
def test_parameters_are_those_that_transformers_makes(model_type, bias):
    """Prevents wrong shapes for a model type that counts as known."""
    config = shape(model_type, 64, 3, 4, 2, intermediate_size=96, vocab_size=200, tie_word_embeddings=False)
    config |= {"head_dim": 16, "pad_token_id": None, "sliding_window": None}
    if model_type in ("llama", "granite"):
        config |= {"attention_bias": bias, "mlp_bias": bias}
    elif model_type == "qwen3":
        config |= {"attention_bias": bias}
    known = dict(config)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(known.pop("model_type"), **known)
        )
    sizes = read_sizes(config)
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    in_layers = [p.numel() for name, p in model.named_parameters() if ".layers." in name and p.ndim == 2]
    assert sizes.weights.matrices == sum(in_layers)


@pytest.mark.parametrize(
    ("quantized", "bits"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "fp8"}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4 + 20 / 32,
        ),
    ],
    ids=["awq", "gptq", "fp8", "compressed-tensors"],
)
def test_quantised_weights(quantized, bits):
    """Prevents an estimate that treats embeddings as quantised, or a quantised checkpoint as 16 bits."""
    sizes = read_sizes(LLAMA3_8B)
    config = {**LLAMA3_8B, "quantization_config": quantized}
    weights = sizes.weights
    for dtype, each in ((None, bits), ("int8", 8)):
        assert weight_bytes(sizes, config, dtype).total == int(weights.matrices * each / 8) + 2 * weights.others


def test_context_limit(run_plan):
    """Prevents stretching a stretched context twice or not at all, and a default length above the limit."""
    linear = {**LLAMA3_8B, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read_sizes(linear).context == 81920
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10240}
    assert read_sizes({**LLAMA3_8B, "rope_scaling": yarn}).context == 40960
    assert rows_of(run_plan({**SMOLLM2, "max_position_embeddings": 800})[1])["dense"][2] == 800


@pytest.mark.parametrize(
    "harmless",
    [
        {"sliding_window": 4096, "use_sliding_window": False},
        {"sliding_window": None, "model_type": "mistral"},
        {"sliding_window": 4096, "model_type": "qwen2"},
        {"layer_types": ["full_attention"] * 32, "kv_lora_rank": None},
    ],
    ids=str,
)
def test_ordinary_models_are_planned(harmless):
    """Prevents refusing a model for a field that is present but off."""
    assert read_sizes({**LLAMA3_8B, **harmless}).bytes_per_token("bfloat16") == 131072
