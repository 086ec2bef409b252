"""Layers with latent KV as the scorer sees them: one layer each, whichever way SGLang computes it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding.factory import get_rope_wrapper
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.rope import no_rotation
from sglang_triattn.patches.model.buffers import kv_buffers
from sglang_triattn.patches.model.inspect import check_pool, read_rope, read_ropes, read_shape
from sglang_triattn.patches.model.layers import Call, attention_layers, watching_queries
from sglang_triattn.patches.model.rotation import Rotation

HEADS, RANK, NOPE, TURNING, VALUE = 4, 24, 10, 8, 6
YARN = {"rope_type": "deepseek_yarn", "factor": 8.0, "original_max_position_embeddings": 64, "mscale": 1.0}


def embedding(**scaling):
    return get_rope_wrapper(
        TURNING, TURNING, 512, 10000, False, {**YARN, "mscale_all_dim": 0.5, **scaling}, torch.float32, device="cpu"
    )


def latent_layer(number: int, **fields) -> torch.nn.Module:
    """What is read of a `DeepseekV2AttentionMLA`."""
    layer = torch.nn.Module()
    layer.attn_mqa = RadixAttention(HEADS, RANK + TURNING, 1.0, 1, number, v_head_dim=RANK)
    layer.attn_mha = RadixAttention(HEADS, NOPE + TURNING, 1.0, HEADS, number, v_head_dim=VALUE)
    layer.rotary_emb = embedding()
    sizes = {"kv_lora_rank": RANK, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": TURNING, "use_dsa": False}
    for name, value in {**sizes, **fields}.items():
        setattr(layer, name, value)
    return layer


def served(**fields) -> SimpleNamespace:
    layers = torch.nn.ModuleList(latent_layer(number, **fields) for number in range(3))
    return SimpleNamespace(
        model=layers,
        pp_group=SimpleNamespace(world_size=1),
        token_to_kv_pool=SimpleNamespace(layer_num=3, start_layer=0),
        model_config=SimpleNamespace(
            model_path="nowhere",
            revision=None,
            model_override_args={},
            hf_config=SimpleNamespace(),
            hf_text_config=SimpleNamespace(),
            get_total_num_attention_heads=lambda: HEADS,
            get_total_num_kv_heads=lambda: HEADS,
        ),
    )


def test_two_ways_to_compute_a_layer_are_one_layer():
    """Prevents scoring each layer twice, and heads of expanded keys in the place of the one that is cached."""
    runner = served()
    layers = attention_layers(runner.model)
    assert [layer.number for layer in layers] == [0, 1, 2]
    (rope,) = read_ropes(runner.model, layers[0].rotary_width)
    shape = read_shape(runner, 1, Rotation(rope, (True,) * 3))
    assert (shape.layers, shape.num_q_heads, shape.num_kv_heads) == ((0, 1, 2), HEADS, 1)
    assert (shape.head_dim, shape.rope.rotary_dim, shape.rotary_start) == (RANK + TURNING, TURNING, RANK)
    assert (shape.rope.style, shape.rope.inv_freq.numel()) == ("interleaved", TURNING // 2)


def test_frequencies_and_scaling_reproduce_the_table():
    """Prevents scores without YaRN's factor on cosines and sines."""
    rotary = embedding()
    rope = read_rope(rotary)
    phases = rope.inv_freq * 300
    found = torch.cat((phases.cos(), phases.sin())) * rope.attention_scaling
    assert torch.allclose(found, rotary.cos_sin_cache[300].double(), atol=1e-4)
    assert rope.attention_scaling > 1.05
    assert read_rope(embedding(mscale_all_dim=1.0)).attention_scaling == 1


@pytest.mark.parametrize(
    ("fields", "rotates", "words"),
    [
        ({"use_dsa": True}, (True,) * 3, "attends to the tokens that an indexer selects"),
        ({"qk_rope_head_dim": TURNING + 2}, (True,) * 3, "not all of its layers with latent KV turn all dims"),
        ({}, (True, False, True), "not all of its layers with latent KV turn all dims of their rotated keys, or none"),
    ],
)
def test_other_layers_are_refused(fields, rotates, words):
    """Prevents scores that leave out what decides, or that turn dims that stand still."""
    runner = served(**fields)
    with pytest.raises(TriAttentionError, match=words):
        read_shape(runner, 1, Rotation(read_rope(embedding()), rotates))


def test_latents_that_nothing_turns():
    """Prevents a launch of Kimi-Linear that fails, or that scores what it keeps by a rotation."""
    shape = read_shape(served(), 1, Rotation(no_rotation(TURNING), (False,) * 3))
    assert (shape.rotates, shape.rotary_start) == ((False,) * 3, RANK)
    assert not shape.rope.inv_freq.any()


def test_layers_of_both_kinds_are_refused():
    """Prevents reading a latent as a head's key."""
    runner = served()
    runner.model[1].attn = RadixAttention(HEADS, 32, 1.0, 1, 3)
    with pytest.raises(TriAttentionError, match="some of its layers have latent KV, and others have not"):
        read_shape(runner, 1, Rotation(read_rope(embedding()), (True,) * 4))


def parts_of(attention: str, query: torch.Tensor, **options):
    """What is seen of one call, with one token of padding after five."""
    model = torch.nn.ModuleList([latent_layer(0)])
    seen = []

    class Seen(Exception):
        pass

    def see(place: int, call: Call) -> None:
        seen.append((call.unfinished(), call.parts(5)))
        raise Seen

    with watching_queries(attention_layers(model), see), pytest.raises(Seen):
        getattr(model[0], attention)(query, None, None, None, **options)
    return seen[0]


def test_queries_of_every_form():
    """Prevents mixing up the two parts of a query, which backends get as one tensor or as two."""
    latent, nope, turning = (torch.randn(6, HEADS, width) for width in (RANK, NOPE, TURNING))
    calls = [
        (parts_of("attn_mqa", torch.cat([latent, turning], -1)), latent, True),
        (parts_of("attn_mqa", latent, q_rope=turning), latent, True),
        (parts_of("attn_mqa", torch.cat([latent, turning], -1).flatten(1)), latent, True),
        (parts_of("attn_mha", torch.cat([nope, turning], -1)), nope, False),
    ]
    for (unfinished, parts), still, absorbed in calls:
        assert (unfinished, parts.absorbed) == (None, absorbed)
        assert torch.equal(parts.still, still[:5].transpose(0, 1))
        assert torch.equal(parts.turning, turning[:5].transpose(0, 1))
    unfinished, _ = parts_of("attn_mqa", latent, q_rope=turning, cos_sin_cache=turning)
    assert unfinished == "with cos_sin_cache"


def pool(**fields) -> MLATokenToKVPool:
    found = MLATokenToKVPool(16, 1, torch.bfloat16, RANK, TURNING, 3, "cpu", False, start_layer=0, end_layer=3)
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def runner_of(found: MLATokenToKVPool) -> SimpleNamespace:
    rows = ReqToTokenPool.__new__(ReqToTokenPool)
    rows._aux_cache = None
    return SimpleNamespace(token_to_kv_pool=found, req_to_token_pool=rows)


def test_rows_of_latents_have_no_values():
    """Prevents moving a row twice, or a view of part of it."""
    found = pool()
    check_pool(runner_of(found))
    keys, values = kv_buffers(found, (0, 2))
    assert values == []
    assert [key.data_ptr() for key in keys] == [found.kv_buffer[0].data_ptr(), found.kv_buffer[2].data_ptr()]
    assert keys[0].shape == (17, 1, RANK + TURNING)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"use_dsa": True}, "packed together with scales"),
        ({"kv_scale_buffer": [1]}, "packed together with scales"),
        ({"kv_cache_dim": RANK + TURNING + 4}, "more than its latent and key"),
    ],
)
def test_packed_latents_are_refused(fields, words):
    """Prevents scores of bytes that are scales."""
    with pytest.raises(TriAttentionError, match=words):
        check_pool(runner_of(pool(**fields)))
