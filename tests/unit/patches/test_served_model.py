"""What the scorer gets of the served model, and which models are refused instead."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.model.inspect import check_pool, read_rope, read_ropes, read_shape
from sglang_triattn.patches.model.layers import attention_layers, check_scales, check_windows
from sglang_triattn.patches.model.rotation import Rotation

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
LONG = {
    "rope_type": "longrope",
    "short_factor": [1 + 0.1 * number for number in range(16)],
    "long_factor": [2.0 + number for number in range(16)],
    "original_max_position_embeddings": 2048,
}


def rotary(scaling=None, neox=True, base=10000, dtype=torch.float32, turning=32):
    return get_rope(32, turning, 4096, base, is_neox_style=neox, rope_scaling=scaling, dtype=dtype)


def served(rotaries, **attention):
    """A model with one attention layer per rotary embedding, inside as much of a model runner as is read."""
    settings = {"num_heads": 4, "head_dim": 32, "scaling": 1.0, "num_kv_heads": 2, **attention}
    layers = torch.nn.ModuleList()
    for number, embedding in enumerate(rotaries):
        layer = torch.nn.Module()
        layer.attn = RadixAttention(layer_id=number, **settings)
        if embedding is not None:
            layer.rotary_emb = embedding
        layers.append(layer)
    return SimpleNamespace(
        model=layers,
        pp_group=SimpleNamespace(world_size=1),
        token_to_kv_pool=SimpleNamespace(layer_num=len(layers), start_layer=0),
        model_config=SimpleNamespace(
            model_path="nowhere",
            revision=None,
            model_override_args={},
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
            get_total_num_attention_heads=lambda: settings["num_heads"],
            get_total_num_kv_heads=lambda: settings["num_kv_heads"],
        ),
    )


def shape_of(runner, ranks=1):
    """The shape of a model that rotates in all layers by its first rotary embedding."""
    (rope, *_) = read_ropes(runner.model, 32)
    return read_shape(runner, ranks, Rotation(rope, (True,) * len(runner.model)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(
    "scaling", [None, LLAMA3, YARN, DYNAMIC, ALPHA, {"rope_type": "linear", "factor": 2.0}], ids=str
)
def test_frequencies_reproduce_the_table(scaling, neox, dtype):
    """Prevents scoring with unscaled or rounded frequencies, which are wrong only at long contexts."""
    embedding = rotary(scaling, neox, dtype=dtype)
    rope = read_rope(embedding)
    assert rope.style == ("half" if neox else "interleaved")
    assert rope.inv_freq.dtype == torch.float64
    exact = rotary(scaling, neox).cos_sin_cache[2000].double()
    phases = rope.inv_freq * 2000
    found = torch.cat((phases.cos(), phases.sin())) * rope.attention_scaling
    assert torch.allclose(found, exact, atol=2e-3)
    if scaling is YARN:
        assert rope.attention_scaling > 1.1


def test_long_rope_in_a_short_context():
    """Prevents scoring by the frequencies of long contexts, or without the factor on cosines and sines."""
    embedding = rotary(LONG)
    rope = read_rope(embedding)
    phases = rope.inv_freq * 2000
    found = torch.cat((phases.cos(), phases.sin())) * rope.attention_scaling
    assert rope.attention_scaling > 1.04
    assert rope.style == "half"
    assert torch.allclose(found, embedding.long_short_cos_sin_cache[2000].double(), atol=2e-3)
    far = embedding.long_short_cos_sin_cache[2048 + 2000].double()
    assert (found - far).abs().max() > 0.5


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, YARN], ids=str)
@pytest.mark.parametrize("interleaved", [True, False])
def test_several_position_axes(scaling, interleaved):
    """Prevents refusing M-RoPE, or scoring text tokens as if the axes changed how they turn."""
    axes = rotary({**scaling, "mrope_section": [4, 6, 6], "mrope_interleaved": interleaved})
    plain = rotary(None if scaling["rope_type"] == "default" else scaling)
    assert type(axes) is not type(plain)
    found, expected = read_rope(axes), read_rope(plain)
    assert torch.equal(found.inv_freq, expected.inv_freq)
    assert (found.attention_scaling, found.style) == (expected.attention_scaling, expected.style)


@pytest.mark.parametrize("neox", [True, False])
def test_partial_rotary(neox):
    """Prevents scoring dims that carry no position as if they rotated."""
    shape = shape_of(served([rotary(neox=neox, turning=12)]))
    assert (shape.head_dim, shape.rope.rotary_dim, shape.rope.inv_freq.numel()) == (32, 12, 6)
    expected = 10000.0 ** (-torch.arange(6, dtype=torch.float64) / 6)
    assert torch.allclose(shape.rope.inv_freq, expected, rtol=1e-6)


def test_unknown_rotary_embeddings_are_refused():
    """Prevents wrong frequencies for kinds whose formula is not known here."""
    linear = rotary({"rope_type": "linear", "factor": (2.0, 4.0)})
    with pytest.raises(TriAttentionError, match="LinearScalingRotaryEmbedding"):
        read_rope(linear)


def test_a_table_that_contradicts_its_frequencies_is_refused():
    """Prevents trusting a formula that a model overrides by writing its table."""
    embedding = rotary(base=20000)
    changed = embedding.cos_sin_cache.clone()
    changed[1:] = -changed[1:]
    broken = SimpleNamespace(cos_sin_cache=changed)
    fake = type(embedding).__new__(type(embedding))
    fake.__dict__.update({**embedding.__dict__, "_buffers": {"cos_sin_cache": broken.cos_sin_cache}})
    with pytest.raises(TriAttentionError, match="does not follow"):
        read_rope(fake)


def test_shape_of_a_plain_model():
    """Prevents wrong head counts, which would pair queries with other heads' keys."""
    shape = shape_of(served([rotary()] * 3))
    assert (shape.num_layers, shape.num_q_heads, shape.num_kv_heads, shape.head_dim) == (3, 4, 2, 32)
    assert shape.fingerprint is None


@pytest.mark.parametrize(
    ("runner", "words"),
    [
        (lambda: served([rotary()] * 2, sliding_window_size=128), "all of its layers attend to a sliding window"),
        (lambda: served([rotary()], is_cross_attention=True), "cross attention"),
        (lambda: served([rotary()], use_irope=True), "local to chunks"),
        (lambda: served([rotary()], pos_encoding_mode="ALIBI"), "bias by position"),
    ],
)
def test_other_attention_is_refused(runner, words):
    """Prevents serving a model whose attention depends on more than the kept keys."""
    with pytest.raises(TriAttentionError, match=words) as caught:
        shape_of(runner())
    assert str(caught.value).endswith(".")


def test_heads_that_do_not_split_are_refused():
    """Prevents scoring the empty heads that SGLang adds, or another rank's."""
    runner = served([rotary()])
    with pytest.raises(TriAttentionError, match="4 query heads do not split evenly over 3 ranks"):
        shape_of(runner, 3)


def test_heads_that_are_split_over_other_groups():
    """Prevents a launch of a model whose heads SGLang splits over ranks with other requests, and a sentence that blames
    how the heads split over those of one group."""
    runner = served([rotary()])
    runner.model_config.get_total_num_attention_heads = lambda: 8
    with pytest.raises(TriAttentionError, match=r"with attention data parallelism, SGLang's code .* over all ranks"):
        shape_of(runner, 1)
    assert shape_of(runner, 2).num_q_heads == 8


def test_missing_kv_layers_are_refused():
    """Prevents a model with other attention next to the scored one from being only half scored."""
    runner = served([rotary()] * 2)
    runner.token_to_kv_pool.layer_num = 3
    with pytest.raises(TriAttentionError, match="2 attention layers were found for 3 KV layers"):
        shape_of(runner)


def test_layers_without_attention_leave_their_kv_empty():
    """Prevents reading the K/V of the wrong layers in a model that says that some have no attention."""
    runner = served([rotary()] * 3)
    runner.model_config.hf_config.block_configs = [object()] * 4
    runner.token_to_kv_pool.layer_num = 4
    runner.model[2].attn.layer_id = 3
    assert shape_of(runner).layers == (0, 1, 3)


def test_layers_that_read_the_kv_of_another():
    """Prevents scoring one KV layer several times, and an attention layer that is missing from being overlooked."""
    runner = served([rotary()] * 5)
    runner.model_config.hf_text_config.num_kv_shared_layers = 2
    for reader in (3, 4):
        runner.model[reader].attn.layer_id = 2
    (rope, *_) = read_ropes(runner.model, 32)
    assert read_shape(runner, 1, Rotation(rope, (True,) * 3, 1)).layers == (0, 1, 2)
    runner.model_config.hf_text_config.num_kv_shared_layers = 1
    with pytest.raises(TriAttentionError, match="5 attention layers were found for 5 KV layers"):
        read_shape(runner, 1, Rotation(rope, (True,) * 3))


def test_a_quarter_of_each_half():
    """Prevents refusing Gemma-4's rotation, or other pairs of dims than those that it turns."""
    scaling = {"rope_type": "proportional"}
    embedding = get_rope(64, 64, 4096, 1e6, rope_scaling=scaling, partial_rotary_factor=0.25, dtype=torch.float32)
    rope = read_rope(embedding)
    assert (rope.style, rope.rotary_dim) == ("half", 64)
    expected = 1e6 ** (-torch.arange(8, dtype=torch.float64) / 32)
    torch.testing.assert_close(rope.inv_freq, torch.cat([expected, torch.zeros(24)]), rtol=1e-6, atol=0)


def test_window_layers_are_not_scored():
    """Prevents scoring keys that no later query sees, and a window that the settings did not foresee."""
    runner = served([rotary()] * 3)
    runner.model[1].attn.sliding_window_size = 127
    assert shape_of(runner).layers == (0, 2)
    check_windows(attention_layers(runner.model), 128)
    with pytest.raises(TriAttentionError, match="layer 1 attends to a sliding window of 128 tokens"):
        check_windows(attention_layers(runner.model), 127)


def test_scales_that_weights_do_not_know_are_refused():
    """Prevents look-up weights from multiplying keys that a float8 pool holds in another size."""
    layers = attention_layers(served([rotary()] * 3).model)
    check_scales(layers)
    layers[2].attention.k_scale_float = layers[2].attention.v_scale_float = 1.0
    check_scales(layers)
    layers[2].attention.v_scale_float = 0.5
    with pytest.raises(TriAttentionError, match="attention layer 2 stores keys and values divided by scales"):
        check_scales(layers)


def test_another_cache_of_the_rows_is_refused(monkeypatch):
    """Prevents rounds on rows that something else must stay in step with."""
    monkeypatch.setattr(MHATokenToKVPool, "get_key_buffer", lambda *_: torch.zeros(1))
    pool = MHATokenToKVPool.__new__(MHATokenToKVPool)
    pool.kv_cache_layout, pool.start_layer = "nhd", 0
    rows = ReqToTokenPool.__new__(ReqToTokenPool)
    rows._aux_cache = None
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=rows)
    check_pool(runner)
    rows._aux_cache = object()
    with pytest.raises(TriAttentionError, match="do not compact its object"):
        check_pool(runner)


def test_other_pools_are_refused():
    """Prevents reading a pool of another layout as if it were slots by heads."""
    with pytest.raises(TriAttentionError, match="KV pool"):
        check_pool(SimpleNamespace(token_to_kv_pool=SimpleNamespace(kv_cache_layout="hnd")))
