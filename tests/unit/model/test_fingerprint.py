"""The fingerprint distinguishes models and gives copies of one model the same value."""

import json

import pytest
import torch
from safetensors.torch import save_file

from sglang_triattn.model.fingerprint import (
    canonical_config,
    model_fingerprint,
    model_variant,
    shown_name,
    without_weights,
)

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "rope_theta": 1000000,
    "rope_scaling": None,
}


def weights() -> dict[str, torch.Tensor]:
    """A checkpoint's tensors in bfloat16, with Qwen's names."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape):
        return torch.randn(*shape, generator=generator).bfloat16()

    return {
        "model.embed_tokens.weight": randn(100, 64),
        "model.layers.0.input_layernorm.weight": randn(64),
        "model.layers.0.self_attn.q_norm.weight": randn(8),
        "model.layers.0.self_attn.k_norm.weight": randn(8),
        "model.layers.0.self_attn.q_proj.weight": randn(64, 64),
        "model.layers.0.self_attn.q_proj.bias": randn(64),
        "model.layers.1.self_attn.q_norm.weight": randn(8),
        "model.norm.weight": randn(64),
    }


@pytest.fixture
def model(tmp_path):
    """Returns a function that writes model folders; its first argument names the folder."""

    def write(name, *, config=CONFIG, tensors=None, shards=1):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        tensors = weights() if tensors is None else tensors
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
            return str(folder)
        places = {}
        for shard in range(shards):
            file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
            part = dict(list(tensors.items())[shard::shards])
            save_file(part, folder / file)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return str(folder)

    return write


def test_shape_of_a_fingerprint(model):
    """Prevents a fingerprint that changes from run to run or cannot be stored as text."""
    path = model("a")
    first = model_fingerprint(path)
    assert first == model_fingerprint(path)
    assert len(first) == 32
    int(first, 16)


def quantised(tensors):
    """What AWQ produces: packed projections, scales folded into the layer norm, zero biases, all in float16."""
    tensors = {name: tensor.half() for name, tensor in tensors.items() if not name.endswith("q_proj.weight")}
    tensors["model.layers.0.self_attn.q_proj.qweight"] = torch.zeros(8, 64, dtype=torch.int32)
    tensors["model.layers.0.self_attn.q_proj.g_idx"] = torch.zeros(64, dtype=torch.int32)
    tensors["model.layers.0.self_attn.k_proj.bias"] = torch.zeros(16, dtype=torch.float16)
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.input_layernorm.weight"] * 3
    return tensors


def test_copies_agree(model):
    """Prevents a quantised, re-sharded or re-saved copy from being refused."""
    original = model_fingerprint(model("original"))
    assert model_fingerprint(model("sharded", shards=3)) == original
    assert model_fingerprint(model("awq", tensors=quantised(weights()))) == original
    single = {name: tensor.float() for name, tensor in weights().items()}
    assert model_fingerprint(model("float32", tensors=single)) == original
    config = {
        **CONFIG,
        "torch_dtype": "float32",
        "quantization_config": {"bits": 4},
        "transformers_version": "9",
    }
    assert model_fingerprint(model("config", config=config)) == original


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.self_attn.q_norm.weight",
        "model.layers.0.self_attn.q_proj.bias",
    ],
)
def test_fine_tunes_differ(model, name):
    """Prevents a base model's statistics from being used for its fine-tune."""
    tensors = weights()
    tensors[name][3] *= 1.02
    assert model_fingerprint(model("tuned", tensors=tensors)) != model_fingerprint(model("original"))


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 4},
        {"num_key_value_heads": 4},
        {"head_dim": 16},
        {"vocab_size": 101},
        {"rope_theta": 10000},
        {"rope_scaling": {"type": "linear", "factor": 2}},
        {"partial_rotary_factor": 0.5},
    ],
    ids=str,
)
def test_architectures_differ(model, change):
    """Prevents models with another shape or other frequencies from sharing a fingerprint."""
    assert model_fingerprint(model("b", config=CONFIG | change)) != model_fingerprint(model("a"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 1e6}, {"rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}}),
        ({}, {"rope_theta": 10000.0, "rope_scaling": None}),
        (
            {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4}},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0}},
        ),
        (
            {"rope_theta": 5e5, "partial_rotary_factor": 0.5},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 0.5}},
        ),
        ({"num_key_value_heads": None, "head_dim": None}, {"num_key_value_heads": 8, "head_dim": 8}),
        ({}, {"text_config": {"hidden_size": 64}}),
    ],
    ids=["theta", "default-theta", "linear", "partial", "default-heads", "nested"],
)
def test_old_and_new_spellings_agree(old, new):
    """Prevents a model re-saved by another transformers version from looking like another model."""
    base = {name: value for name, value in CONFIG.items() if not name.startswith("rope")}
    assert canonical_config(base | old) == canonical_config(base | new)


def test_vision_language_models_in_old_and_new_files(model):
    """Prevents a copy in another layout from being refused, and a vision encoder's norms from counting."""
    rope = {"mrope_section": [2, 1, 1]}
    flat = CONFIG | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    text = {name: value for name, value in CONFIG.items() if name != "architectures"} | {
        "model_type": "qwen2_5_vl_text"
    }
    nested = {name: flat[name] for name in ("architectures", "model_type")}
    nested["text_config"] = text | {"rope_scaling": rope | {"rope_type": "default"}}
    old = model("old", config=flat | {"rope_scaling": rope | {"type": "mrope"}})
    renamed = {name.replace("model.", "model.language_model.", 1): value for name, value in weights().items()}
    new = model("new", config=nested, tensors=renamed | {"model.visual.merger.norm.weight": torch.ones(64)})
    assert model_fingerprint(new) == model_fingerprint(old)
    renamed["model.language_model.norm.weight"][3] *= 1.02
    assert model_fingerprint(model("tuned", config=nested, tensors=renamed)) != model_fingerprint(old)


def test_without_weights_the_configuration_counts(model, tmp_path):
    """Prevents a crash if weights are damaged or in another format."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(CONFIG))
    damaged = model("damaged", tensors={})
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"damaged")
    assert model_fingerprint(str(bare)) == model_fingerprint(damaged)
    assert model_fingerprint(str(bare)) != model_fingerprint(model("whole"))


@pytest.mark.parametrize("name", ["", "none", "no/such-model", "not a name/at all", "model.gguf"])
def test_models_without_configuration_have_none(tmp_path, monkeypatch, name):
    """Prevents a crash, or a download, for models whose files are not on this machine."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "none").mkdir()
    path = str(tmp_path / name) if name in ("none", "model.gguf") else name
    assert model_fingerprint(path) is None
    (tmp_path / "none" / "config.json").write_text("{")
    assert model_fingerprint(path) is None


def test_the_variant_of_a_fine_tune_is_its_own(model):
    """Prevents a merge of LoRA, which leaves all norms and biases alone, from passing for its base."""
    base = model("base")
    tuned = weights()
    tuned["model.layers.0.self_attn.q_proj.weight"] += 0.01
    other = model("tuned", tensors=tuned)
    assert model_fingerprint(base) == model_fingerprint(other)
    assert model_variant(base) != model_variant(other)
    copies = [
        model("wide", tensors={name: tensor.float() for name, tensor in weights().items()}),
        model("sharded", shards=3),
        model("named", tensors={f"language_model.{name}": tensor for name, tensor in weights().items()}),
    ]
    assert {model_variant(copy) for copy in copies} == {model_variant(base)}
    assert len(model_variant(base)) == 9


def test_a_quantised_copy_has_no_weights_to_show(model):
    """Prevents packed or scaled weights from passing for another model's."""
    for name, dtype in (("packed", torch.int32), ("scaled", torch.float8_e4m3fn)):
        tensors = weights()
        key = "model.layers.0.self_attn.q_proj.weight"
        tensors[key] = tensors[key].to(dtype)
        assert model_variant(model(name, tensors=tensors)) == ""


def test_overridden_settings_are_part_of_the_variant(model):
    """Prevents statistics measured under --json-model-override-args from serving launches without."""
    folder = model("base")
    plain, changed = model_variant(folder), model_variant(folder, overrides={"rms_norm_eps": 1e-3})
    assert changed.endswith(f"-{plain}")
    assert changed != model_variant(folder, overrides={"rms_norm_eps": 1e-4})
    assert model_variant(folder, overrides={}) == plain
    assert (without_weights(changed), without_weights(plain)) == (changed.split("-")[0], "")


def test_a_folder_is_shown_by_its_name(model, tmp_path):
    """Prevents paths of somebody's machine in files that are passed on."""
    assert shown_name(model("base")) == "base"
    assert shown_name("org/model") == "org/model"
