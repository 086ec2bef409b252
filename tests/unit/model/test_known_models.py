"""What the config.json of 49 known models says about their layers, and whether they are compressed."""

import copy
import json
from collections import Counter

import pytest

from plan_cases import CONFIGS
from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.compatibility.uncovered import why_uncovered
from sglang_triattn.model.layout import AttentionLayout, Layer, read_layout

INDEXED = "an indexer selects"

# File: (layers by kind, {(dims of a scored layer that RoPE turns, the others): layers}, bytes per token in 16 bits,
# words of the reason against it).
MODELS = {
    "apertus-8b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "command-a": ({"full": 16, "window": 48}, {(0, 128): 16}, 262144, None),
    "deepseek-r1-distill-llama-8b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "deepseek-v3": ({"latent": 61}, {(64, 512): 61}, 61 * 576 * 2, None),
    "deepseek-v3.2": ({"latent": 61}, {(64, 512): 61}, 61 * 576 * 2, INDEXED),
    "dots.llm1": ({"full": 62}, {(128, 0): 62}, 62 * 32 * 512, None),
    "ernie-4.5-21b-a3b": ({"full": 28}, {(128, 0): 28}, 57344, None),
    "exaone-4-32b": ({"full": 16, "window": 48}, {(0, 128): 16}, 262144, None),
    "falcon-h1-7b": ({"full": 44}, {(128, 0): 44}, 45056, None),
    "gemma-2-9b": ({"full": 21, "window": 21}, {(256, 0): 21}, 344064, None),
    "gemma-3-1b": ({"full": 4, "window": 22}, {(256, 0): 4}, 26624, None),
    "gemma-3-27b": ({"full": 10, "window": 52}, {(128, 0): 10}, 62 * 16 * 512, None),
    "gemma-4-31b": ({"full": 10, "window": 50}, {(128, 384): 10}, 10 * 4 * 2048, None),
    # Four of the seven read the KV of the third, and SGLang's pool has room for all of them.
    "gemma-4-e2b": ({"full": 7, "window": 28}, {(128, 384): 3}, 7 * 2048, None),
    "glm-4.5v": ({"full": 46}, {(64, 64): 46}, 188416, None),
    "glm-4.6": ({"full": 92}, {(64, 64): 92}, 376832, None),
    "glm-4.7-flash": ({"latent": 47}, {(64, 512): 47}, 47 * 576 * 2, None),
    "gpt-oss-20b": ({"full": 12, "window": 12}, {(64, 0): 12}, 12 * 8 * 256, None),
    "granite-3.3-8b": ({"full": 40}, {(128, 0): 40}, 163840, None),
    "granite-4-h-small": ({"full": 4, "linear": 36}, {(0, 128): 4}, 16384, None),
    "hunyuan-7b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "hunyuan-a13b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "kimi-k2": ({"latent": 61}, {(64, 512): 61}, 61 * 576 * 2, None),
    "kimi-linear-48b-a3b": ({"latent": 7, "linear": 20}, {(0, 576): 7}, 7 * 576 * 2, None),
    "lfm2-1.2b": ({"full": 6, "linear": 10}, {(64, 0): 6}, 12288, None),
    "llama-3.3-70b": ({"full": 80}, {(128, 0): 80}, 327680, None),
    "longcat-flash": ({"latent": 56}, {(64, 512): 56}, 56 * 576 * 2, None),
    "magistral-small-2509": ({"full": 40}, {(128, 0): 40}, 163840, None),
    "mimo-v2-flash": ({"full": 9, "window": 39}, {(64, 128): 9}, 9 * 4 * (192 + 128) * 2, None),
    "minimax-m2": ({"full": 62}, {(64, 64): 62}, 253952, None),
    "ministral-3-8b": ({"full": 34}, {(128, 0): 34}, 139264, None),
    "mistral-7b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "mistral-small-3.2-24b": ({"full": 40}, {(128, 0): 40}, 163840, None),
    "mixtral-8x7b": ({"full": 32}, {(128, 0): 32}, 131072, None),
    "nemotron-nano-9b-v2": ({"full": 4, "linear": 27, "none": 25}, {(0, 128): 4}, 16384, None),
    # SGLang's pool has room for all 80 layers.
    "nemotron-super-49b": ({"full": 49, "none": 31}, {(128, 0): 49}, 327680, None),
    "olmo-2-32b": ({"full": 64}, {(128, 0): 64}, 262144, None),
    "olmo-3-7b": ({"full": 8, "window": 24}, {(128, 0): 8}, 524288, None),
    "phi-4": ({"full": 40}, {(128, 0): 40}, 204800, None),
    "qwen2.5-7b": ({"full": 28}, {(128, 0): 28}, 57344, None),
    "qwen2.5-vl-7b": ({"full": 28}, {(128, 0): 28}, 57344, None),
    "qwen3-30b-a3b": ({"full": 48}, {(128, 0): 48}, 98304, None),
    "qwen3-32b": ({"full": 64}, {(128, 0): 64}, 262144, None),
    "qwen3-next-80b-a3b": ({"full": 12, "linear": 36}, {(64, 192): 12}, 24576, None),
    "qwen3-vl-8b": ({"full": 36}, {(128, 0): 36}, 147456, None),
    "qwen3.5-27b": ({"full": 16, "linear": 48}, {(64, 192): 16}, 65536, None),
    "qwq-32b": ({"full": 64}, {(128, 0): 64}, 262144, None),
    "seed-oss-36b": ({"full": 64}, {(128, 0): 64}, 262144, None),
    "smollm3-3b": ({"full": 36}, {(128, 0): 27, (0, 128): 9}, 73728, None),
    "step-3.5-flash": ({"full": 12, "window": 33}, {(64, 64): 12}, 12 * 8 * 512, None),
}


def content(name: str) -> dict:
    return json.loads((CONFIGS / f"{name}.json").read_text())


def layout(name: str) -> AttentionLayout:
    return read_layout(content(name))


def scored(found: AttentionLayout) -> list[Layer]:
    return [found.layers[number] for number in found.scored]


@pytest.mark.parametrize("name", MODELS)
def test_layers(name):
    """Prevents scoring a layer or dims that a model does not have, and figures for a KV cache of another size."""
    kinds, dims, size, _ = MODELS[name]
    found = layout(name)
    assert found.kinds == kinds
    assert Counter((layer.rotary_dim, layer.head_dim - layer.rotary_dim) for layer in scored(found)) == dims
    assert found.elements() * 2 == size


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
TURNED = [
    ({"architectures": ["GraniteSWAForCausalLM"], "layer_rope_theta": [0, 1e4, 1e4, 0]}, [0, 16, 16, 0]),
    # The same field lists flags here, and numbers there.
    ({"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 3, 0, 1]}, [16, 16, 0, 16]),
    ({"architectures": ["IQuestQ1ForCausalLM"], "no_rope_layers": [1, 3]}, [16, 0, 16, 0]),
]


@pytest.mark.parametrize(("fields", "turned"), TURNED)
def test_layers_that_rope_turns(fields, turned):
    """Prevents statistics that are refused, or scores, for a layer that RoPE turns or not."""
    assert [layer.rotary_dim for layer in read_layout({**SIZES, **fields}).layers] == turned


def test_query_heads_by_layer():
    """Prevents figures for another number of heads than that of the layers that are scored."""
    listed = {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads_per_layer": [8, 4] * 2}
    found = read_layout({**SIZES, **listed, "sliding_window": 8, "architectures": ["LagunaForCausalLM"]})
    assert [layer.q_heads for layer in found.layers] == [8, 4, 8, 4]


def test_names_of_dbrx():
    """Prevents a model that is accepted, but of which nothing can be read."""
    sizes = {"d_model": 64, "n_layers": 4, "n_heads": 8, "attn_config": {"kv_n_heads": 2}}
    found = read_layout({**sizes, "architectures": ["DbrxForCausalLM"]})
    assert [(layer.q_heads, layer.kv_heads, layer.head_dim) for layer in found.layers] == [(8, 2, 8)] * 4


def test_full_layers_by_group():
    """Prevents a layer that keeps a state from counting as one with latents, and the reverse."""
    fields = {"kv_lora_rank": 32, "qk_rope_head_dim": 8, "layer_group_size": 2}
    found = read_layout({**SIZES, **fields, "architectures": ["BailingMoeV2_5ForCausalLM"]})
    assert [layer.kind for layer in found.layers] == ["linear", "latent"] * 2


def test_layers_that_run_twice():
    """Prevents figures for half of a KV cache."""
    found = read_layout({**SIZES, "num_loops": 2, "architectures": ["NanbeigeForCausalLM"]})
    assert len(found.scored) == 8


@pytest.mark.parametrize("name", MODELS)
def test_accepted_or_why_not(name):
    """Prevents accepting a model that compression does not cover, and refusing one that it does."""
    expected, found = MODELS[name][-1], why_uncovered(uncovered_in_file(content(name)))
    assert found is None if expected is None else expected in str(found)


def test_every_file_is_known():
    """Prevents a file without an expectation, and another count in the documents."""
    assert {file.stem for file in CONFIGS.glob("*.json")} == MODELS.keys()


@pytest.mark.parametrize(
    ("name", "numbers", "window", "own_pool"),
    [
        ("command-a", [3, 7, 11], 4097, False),
        ("exaone-4-32b", [3, 7, 11], 4096, False),
        ("gemma-2-9b", [1, 3, 5], 4096, False),
        ("gemma-3-1b", [5, 11, 17], 512, False),
        ("gemma-4-31b", [5, 11, 17], 1024, True),
        ("gemma-4-e2b", [4, 9, 14], 512, True),
        ("gpt-oss-20b", [1, 3, 5], 128, True),
        ("mimo-v2-flash", [0, 5, 11], 129, True),
        ("olmo-3-7b", [3, 7, 11], 4096, False),
        ("step-3.5-flash", [0, 4, 8], 513, True),
        ("nemotron-super-49b", [0, 1, 2, 3, 4, 5, 8], 0, False),
        ("nemotron-nano-9b-v2", [14, 21, 30], 0, False),
        ("kimi-linear-48b-a3b", [3, 7, 11], 0, False),
        ("deepseek-v3", [0, 1, 2], 0, False),
    ],
)
def test_places_and_windows(name, numbers, window, own_pool):
    """Prevents scores of window layers, a window off by one, and windows sought in the wrong pool."""
    found = layout(name)
    assert list(found.scored[: len(numbers)]) == numbers
    assert (found.window, found.window_pool) == (window, own_pool)
    assert {layer.window for layer in found.layers if layer.kind == "window"} <= {window}
    assert {layer.window for layer in found.layers if layer.kind != "window"} == {0}


def test_a_pool_for_windows_is_counted_by_itself():
    """Prevents bytes of window layers that a token outside the window does not hold, and other heads' widths."""
    assert layout("gpt-oss-20b").elements(windows=True) == 12 * 8 * 128
    assert layout("mimo-v2-flash").elements(windows=True) == 39 * 8 * (192 + 128)
    assert layout("gemma-4-31b").elements(windows=True) == 50 * 16 * 512
    assert layout("gemma-4-e2b").elements(windows=True) == 28 * 512
    assert layout("step-3.5-flash").elements(ranks=16, windows=True) == 33 * 256
    assert layout("gemma-3-1b").elements(windows=True) == 0


def test_heads_that_transformers_writes_for_each_layer():
    """Prevents heads of window layers in layers with full attention, where a file was saved by transformers."""
    published = content("gemma-4-31b")
    saved = copy.deepcopy(published)
    text = saved["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    full = {"head_dim": 512, "num_key_value_heads": 4}
    text["per_layer_config"] = {str(number): full for number in layout("gemma-4-31b").scored}
    assert read_layout(saved) == read_layout(published)


def test_latent_kv_is_on_every_gpu():
    """Prevents splitting what tensor parallelism copies."""
    assert layout("deepseek-v3").elements(8) == layout("deepseek-v3").elements(1) == 61 * 576


def test_sinks_and_styles():
    """Prevents a pairing of dims that SGLang does not serve with."""
    assert all(layer.sinks for layer in layout("gpt-oss-20b").layers)
    assert {layer.kind for layer in layout("mimo-v2-flash").layers if layer.sinks} == {"window"}
    interleaved = {name for name in MODELS if layout(name).style == "interleaved"}
    latent = {name for name in MODELS if layout(name).latent}
    assert interleaved == {"command-a", "ernie-4.5-21b-a3b"} | latent
    minicpm3 = {**content("deepseek-v3"), "architectures": ["MiniCPM3ForCausalLM"]}
    assert read_layout(minicpm3).style == "half"
