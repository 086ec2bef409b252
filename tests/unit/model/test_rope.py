"""RoPE read from transformers models, and its arithmetic."""

import copy
import math

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from sglang_triattn.model.rope import Rope, RopeError, from_complex, rope_of_transformers, rotate, to_complex, unrotate
from tiny_models import COMMON

THETA = 5e5
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}


def model_of(config):
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).base_model


def llama(**rope_parameters):
    rope_parameters = {"rope_type": "default", "rope_theta": THETA, **rope_parameters}
    return transformers.LlamaConfig(**COMMON, rope_parameters=rope_parameters)


def plain(dim: int, theta: float = THETA) -> torch.Tensor:
    return theta ** (-2 * torch.arange(dim // 2, dtype=torch.float64) / dim)


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [8, 6])
def test_rotation_inverts_and_scales(style, rotary_dim):
    """Prevents undoing another rotation than the model's, and touching dims that do not rotate."""
    rope = Rope(plain(rotary_dim), 1.25, rotary_dim, style)
    x = torch.randn(3, 5, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 9, 4000, 100_000])
    turned = rotate(x, positions, rope)
    torch.testing.assert_close(turned[..., rotary_dim:], x[..., rotary_dim:])
    torch.testing.assert_close(unrotate(turned, positions, rope), x)
    angles = positions.double()[:, None] * rope.inv_freq
    torch.testing.assert_close(to_complex(turned, rope), to_complex(x, rope) * torch.exp(1j * angles) * 1.25)
    torch.testing.assert_close(from_complex(to_complex(x, rope), rope), x[..., :rotary_dim])


@pytest.mark.parametrize("rope_parameters", [{}, LLAMA3, YARN, LINEAR], ids=["default", "llama3", "yarn", "linear"])
def test_agrees_with_transformers(rope_parameters):
    """Prevents frequencies or scaling that differ from the ones the model itself applies."""
    config = llama(**rope_parameters)
    rotary = modeling_llama.LlamaRotaryEmbedding(config)
    rope = rope_of_transformers(model_of(config), config)
    assert rope.style == "half"
    assert rope.rotary_dim == 8
    assert rope.inv_freq.dtype == torch.float64
    q = torch.randn(1, 2, 40, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(40)
    expected, _ = modeling_llama.apply_rotary_pos_emb(q, q, *rotary(q, positions[None]))
    torch.testing.assert_close(rotate(q, positions, rope), expected, rtol=1e-5, atol=1e-5)
    alone = rope_of_transformers(rotary, config)
    assert torch.equal(alone.inv_freq, rope.inv_freq)
    assert alone.attention_scaling == rope.attention_scaling


def test_scaled_values():
    """Prevents scaling from being dropped both in this code and in the comparison with transformers."""
    config = llama()
    torch.testing.assert_close(rope_of_transformers(model_of(config), config).inv_freq, plain(8), rtol=1e-6, atol=0)
    config = llama(**LINEAR)
    rope = rope_of_transformers(model_of(config), config)
    torch.testing.assert_close(rope.inv_freq, plain(8) / 4, rtol=1e-6, atol=0)
    assert rope.attention_scaling == 1.0
    config = llama(**YARN)
    assert math.isclose(rope_of_transformers(model_of(config), config).attention_scaling, 0.1 * math.log(4) + 1)


def test_interleaved_partial_model():
    """Prevents GLM's pairing of adjacent dims, over part of a head, from being read as halves."""
    config = transformers.GlmConfig(**COMMON, head_dim=16, partial_rotary_factor=0.5)
    rope = rope_of_transformers(model_of(config), config)
    assert rope.style == "interleaved"
    assert rope.rotary_dim == 8


def dynamic():
    return llama(rope_type="dynamic", factor=2.0)


def longrope():
    return llama(
        rope_type="longrope", factor=2.0, short_factor=[1.0] * 4, long_factor=[2.0] * 4,
        original_max_position_embeddings=2048,
    )  # fmt: skip


def gpt2():
    return transformers.GPT2Config(n_embd=48, n_head=6, n_layer=1, vocab_size=50)


def gemma3(**full):
    kinds = ["sliding_attention", "full_attention"]
    rope = {kinds[0]: {"rope_type": "default", "rope_theta": 500.0}, kinds[1]: {"rope_theta": 1e4, **full}}
    return transformers.Gemma3TextConfig(
        **COMMON | {"num_hidden_layers": 2}, head_dim=8, layer_types=kinds, rope_parameters=rope
    )


def test_layers_of_several_kinds():
    """Prevents the frequencies of window layers from being taken for those of the layers that are scored."""
    config = gemma3(rope_type="linear", factor=8.0)
    rope = rope_of_transformers(model_of(config), config)
    torch.testing.assert_close(rope.inv_freq, plain(8, 1e4) / 8, rtol=1e-6, atol=0)
    assert rope.style == "half"


def test_dims_left_alone_between_those_that_turn():
    """Prevents other pairs of dims than those that a quarter of each half makes up (Gemma 4)."""
    full = {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}
    options = {**COMMON, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    options["rope_parameters"] = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    options["rope_parameters"]["full_attention"] = full
    config = transformers.Gemma4TextConfig(**options, head_dim=8, global_head_dim=32)
    rope = rope_of_transformers(model_of(config), config)
    assert (rope.style, rope.rotary_dim) == ("half", 32)
    expected = 1e6 ** (-torch.arange(4, dtype=torch.float64) / 16)
    torch.testing.assert_close(rope.inv_freq, torch.cat([expected, torch.zeros(12)]), rtol=1e-6, atol=0)
    turned = rotate(torch.ones(1, 32), torch.tensor([3]), rope)[0]
    assert (turned != 1).nonzero().flatten().tolist() == [0, 1, 2, 3, 16, 17, 18, 19]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (dynamic, "'dynamic' changes its frequencies"),
        (longrope, "'longrope' changes its frequencies"),
        (gpt2, "GPT2Model has no rotary"),
        (lambda: gemma3(rope_type="dynamic", factor=2.0), "'dynamic' changes its frequencies"),
        # A factor that this model does not read.
        (lambda: llama(rope_type="dynamic", factor=2.0, alpha=4.0), "'dynamic' changes its frequencies"),
    ],
)
def test_unsupported_embeddings_are_refused(config, message):
    """Prevents scores from frequencies that are not, or not always, the model's."""
    config = config()
    with pytest.raises(RopeError, match=message) as error:
        rope_of_transformers(model_of(config), config)
    assert "\n" not in str(error.value)


def test_frequencies_that_are_stretched_once():
    """Prevents a refusal of Hunyuan's RoPE, which has the name of one that changes, and other frequencies than its."""
    rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    config = transformers.HunYuanDenseV1Config(**COMMON, head_dim=8, rope_parameters=rope_parameters)
    base = 1e4 * 1000 ** (8 / 6)
    expected = base ** (-torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    torch.testing.assert_close(rope_of_transformers(model_of(config), config).inv_freq, expected, rtol=1e-6, atol=0)


def test_two_different_embeddings_are_refused():
    """Prevents picking one of two embeddings by chance."""
    config = llama()
    model = model_of(config)
    model.second = copy.deepcopy(model.rotary_emb)
    rope_of_transformers(model, config)
    model.second.inv_freq.mul_(2)
    with pytest.raises(RopeError, match="several different"):
        rope_of_transformers(model, config)


def test_rounded_frequencies_are_refused():
    """Prevents a converted model's rounded frequencies, off by radians after a few thousand tokens."""
    config = llama()
    with pytest.raises(RopeError, match=r"rounded to torch\.bfloat16"):
        rope_of_transformers(model_of(config).bfloat16(), config)


def test_unknown_rotation_is_refused(monkeypatch):
    """Prevents guessing how a model rotates its queries."""
    config = llama()
    model = model_of(config)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q * cos, k * cos))
    with pytest.raises(RopeError, match="not supported"):
        rope_of_transformers(model, config)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, table: (q, k))
    with pytest.raises(RopeError, match="not supported"):
        rope_of_transformers(model, config)
    monkeypatch.delattr(modeling_llama, "apply_rotary_pos_emb")
    with pytest.raises(RopeError, match="not supported"):
        rope_of_transformers(model, config)
