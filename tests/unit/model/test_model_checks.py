"""Models are refused or accepted by what their config.json says."""

import json
from types import SimpleNamespace

import pytest
import transformers

from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.launch.model_config import check_model_file

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
}
FULL, SLIDING = "full_attention", "sliding_attention"
GROUPS = [{"attention": {"n_heads_in_group": size}} for size in (2, 4)]

# (architecture, its fields, words that the reason contains)
REFUSED = [
    ("HunYuanMoEV1ForCausalLM", {"use_cla": True}, "share KV"),
    ("Gemma3ForCausalLM", {"layer_types": [SLIDING, FULL] * 2, "num_kv_shared_layers": 1}, "share KV"),
    ("BeamForCausalLM", {"layer_types": [SLIDING, FULL]}, "a KV pool of their own"),
    ("Gemma4ForCausalLM", {"vision_config": {"x": 1}}, "images or sound"),
    ("Gemma4ForConditionalGeneration", {"text_config": {"use_bidirectional_attention": "all"}}, "attend to later ones"),
    ("MiMoV2ForCausalLM", {"vision_config": {"depth": 2}, "audio_config": {"x": 1}}, "images or sound"),
    ("LlamaForCausalLM", {"v_head_dim": 16}, "different widths"),
    ("LlamaForCausalLM", {"sliding_window": 4096, "layer_types": ["linear_attention", FULL]}, "linear-attention"),
    ("Llama4ForCausalLM", {"attention_chunk_size": 8192}, "local to chunks"),
    ("Llama4ForCausalLM", {"no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": True}, "by length"),
    ("DeciLMForCausalLM", {"block_configs": GROUPS}, "differ from one another"),
    ("LlamaForCausalLM", {"kv_lora_rank": 256}, "none of the models for which that is covered"),
    ("DeepseekV32ForCausalLM", {"kv_lora_rank": 512, "index_topk": 2048}, "an indexer selects"),
    ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512, "index_topk": 2048}, "an indexer selects"),
    ("GlmMoeDsaForCausalLM", {"kv_lora_rank": 512, "index_topk": 2048}, "an indexer selects"),
    ("DeepseekV3ForCausalLM", {"kv_lora_rank": 512, "linear_attn_config": {"x": 1}}, "linear-attention layers"),
    ("FalconMambaForCausalLM", {"model_type": "falcon_mamba"}, "state-space"),
    ("BambaForCausalLM", {"mamba_d_state": 16, "layers_block_type": ["mamba", "attention"]}, "state-space"),
    ("Zamba2ForCausalLM", {"mamba_d_state": 16, "layer_types": ["mamba", FULL]}, "state-space"),
    ("MiniCPMSALAForCausalLM", {"mixer_types": ["minicpm4", "lightning-attn"]}, "linear-attention"),
    ("MiniCPMForCausalLM", {"mixer_types": ["minicpm4"], "sparse_config": {"topk": 64}}, "selected blocks"),
    ("LongcatFlashForCausalLM", {"ngram_vocab_size_ratio": 4}, "the length of the row"),
    (
        "LlavaForConditionalGeneration",
        {"vision_config": {"x": 1}, "text_config": {"model_type": "gemma3"}},
        "its language model",
    ),
    ("Llama4ForConditionalGeneration", {"vision_config": {"depth": 2}}, "images or sound"),
    ("Qwen3ForCausalLM", {"thinker_config": {"audio_config": {"x": 1}}}, "images or sound"),
    ("NewForCausalLM", {}, "not known here"),
    ("LagunaForCausalLM", {"num_attention_heads_per_layer": [4, 8, 4, 4]}, "differ from one another"),
    ("GraniteMoeForCausalLM", {"position_embedding_type": "nope"}, "no rotary embedding"),
    ("BaichuanForCausalLM", {"hidden_size": 5120}, "ALiBi"),
    ("XllmForCausalLM", {"rope_head_dim": 16}, "other dims of a head"),
    ("GraniteForCausalLM", {"layer_rope_theta": [1e4, 1e4, 5e5, 5e5]}, "in different ways"),
    ("LlamaForCausalLM", {"rope_parameters": {"some_layers": {"rope_theta": 1e6}}}, "in different ways"),
    ("LlamaForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "proportional"}}}, "kind proportional"),
    ("HrmTextForCausalLM", {}, "several times"),
    ("SDARForCausalLM", {}, "diffusion"),
    ("Grok1ForCausalLM", {"attn_temperature_len": 1024}, "by length"),
    ("InternLM2ForCausalLM", {"rope_scaling": {"type": "default", "use_fope": True}}, "of the kind fope"),
    ("Qwen3ForCausalLM", {"rope_scaling": {"rope_type": "default", "mrope_section": [8, 4, 4]}}, "position axes"),
    ("Qwen2ForCausalLM", {"dual_chunk_attention_config": {"chunk_size": 8192}}, "local to chunks"),
]

# Served and compressed: files as transformers writes them by default, and as the models' authors do.
ACCEPTED = [
    *("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "Granite", "GraniteMoe", "Olmo2"),
    *("Olmoe", "Phi3", "Starcoder2", "StableLm", "Gemma", "Cohere", "Glm4", "Glm4Moe", "Apertus", "Arcee", "Phi"),
]  # fmt: skip
ACCEPTED_FIELDS = [
    ("MistralForCausalLM", {"sliding_window": 4096}),
    ("Gemma2ForCausalLM", {"sliding_window": 4096}),
    ("Gemma3ForCausalLM", {"sliding_window": 512, "sliding_window_pattern": 2}),
    (
        "Gemma3ForCausalLM",
        {
            "sliding_window_pattern": 2,
            "rope_parameters": {FULL: {"rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}},
        },
    ),
    ("Olmo3ForCausalLM", {"layer_types": [SLIDING, FULL]}),
    ("Cohere2ForCausalLM", {"sliding_window": 4096}),
    ("Exaone4ForCausalLM", {"sliding_window": 4096, "layer_types": [SLIDING, FULL]}),
    ("GptOssForCausalLM", {"layer_types": [SLIDING, FULL], "sliding_window": 128}),
    ("Step3p5ForCausalLM", {"layer_types": [FULL, SLIDING], "sliding_window": 512}),
    (
        "MiMoV2FlashForCausalLM",
        {"sliding_window": 128, "head_dim": 192, "v_head_dim": 128, "hybrid_layer_pattern": [0, 1, 1, 0]},
    ),
    (
        "Gemma4ForConditionalGeneration",
        {
            "vision_config": {"x": 1},
            "audio_config": {"x": 1},
            "text_config": {
                "layer_types": [SLIDING, FULL, SLIDING, FULL],
                "sliding_window": 512,
                "num_kv_shared_layers": 2,
                "use_bidirectional_attention": "vision",
                "rope_parameters": {FULL: {"rope_type": "proportional"}, SLIDING: {"rope_type": "default"}},
            },
        },
    ),
    ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 1, 1, 0]}),
    ("SeedOssForCausalLM", {}),
    ("DeciLMForCausalLM", {"block_configs": [*GROUPS[:1] * 3, {"attention": {"no_op": True}}]}),
    ("Qwen2ForCausalLM", {"sliding_window": 32768, "use_sliding_window": True, "layer_types": [FULL, SLIDING]}),
    ("Exaone4ForCausalLM", {"sliding_window": None, "layer_types": [FULL] * 4}),
    ("GraniteMoeHybridForCausalLM", {"mamba_d_state": 16, "layer_types": ["attention"] * 4}),
    (
        "GraniteMoeHybridForCausalLM",
        {"mamba_d_state": 16, "layer_types": ["mamba", "attention"], "position_embedding_type": "nope"},
    ),
    ("FalconH1ForCausalLM", {"mamba_d_state": 16}),
    ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*-E"}),
    ("MiniMaxM2ForCausalLM", {"rotary_dim": 16}),
    ("InternLM2ForCausalLM", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    ("XllmForCausalLM", {"rope_head_dim": 32}),
    ("GPT2LMHeadModel", {}),
    ("GPTBigCodeForCausalLM", {"multi_query": True, "position_embedding_type": "learned_absolute"}),
    ("OPTForCausalLM", {}),
    ("BaichuanForCausalLM", {"hidden_size": 4096}),
    ("HunYuanDenseV1ForCausalLM", {"use_qk_norm": True, "rope_scaling": {"type": "dynamic", "alpha": 1000.0}}),
    ("HunYuanMoEV1ForCausalLM", {"use_qk_norm": True, "use_cla": False}),
    ("MiniCPMForCausalLM", {"sparse_config": {"topk": 64}}),
    ("MistralLarge3ForCausalLM", {"kv_lora_rank": 512, "llama_4_scaling": {"beta": 0.1}}),
    ("PixtralForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {"kv_lora_rank": 512}}),
    ("Llama4ForCausalLM", {"no_rope_layers": [1, 1, 1, 1], "no_rope_layer_interval": 4}),
    (
        "Qwen2_5_VLForConditionalGeneration",
        {"vision_config": {"depth": 2}, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}},
    ),
    (
        "Qwen3VLForConditionalGeneration",
        {
            "vision_config": {"depth": 2},
            "text_config": {"rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20]}},
        },
    ),
    ("Gemma3ForConditionalGeneration", {"vision_config": {"x": 1}, "sliding_window": 512, "sliding_window_pattern": 2}),
    ("Lfm2VlForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {"layer_types": ["conv", FULL]}}),
    ("KimiK25ForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {"kv_lora_rank": 512}}),
    ("InternVLChatModel", {"vision_config": {"x": 1}, "llm_config": {"num_hidden_layers": 4}}),
    (
        "LagunaForCausalLM",
        {
            "layer_types": [SLIDING, FULL] * 2,
            "sliding_window": 512,
            "num_attention_heads_per_layer": [6, 4] * 2,
            "rope_parameters": {FULL: {"rope_type": "yarn"}, SLIDING: {"rope_type": "default"}},
        },
    ),
    (
        "GraniteSWAForCausalLM",
        {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 128, "layer_rope_theta": [1e4, 0, 1e4, 0]},
    ),
    ("GraniteForCausalLM", {"layer_rope_theta": [1e4, 0, 1e4, 1e4]}),
    ("Gemma3nForCausalLM", {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 512, "num_kv_shared_layers": 2}),
    ("Gemma4ForCausalLM", {"layer_types": [SLIDING, FULL] * 2, "sliding_window": 512}),
    ("MuseGlimmerForCausalLM", {"sliding_window": 2048, "layer_types": None}),
    ("NanbeigeForCausalLM", {"num_loops": 2}),
    ("DeepseekV2ForCausalLM", {"kv_lora_rank": 512}),
    ("MiniCPM3ForCausalLM", {"kv_lora_rank": 256}),
    ("LongcatFlashForCausalLM", {"kv_lora_rank": 512}),
    ("KimiLinearForCausalLM", {"kv_lora_rank": 512, "linear_attn_config": {"full_attn_layers": [4]}}),
    ("BailingMoeV2_5ForCausalLM", {"kv_lora_rank": 512, "layer_group_size": 4}),
    ("GigaChat35ForCausalLM", {"kv_lora_rank": 512, "layer_types": ["linear_attention", "attention"] * 2}),
    # Wrappers of a language model that is accepted, of which requests without images are.
    ("LlavaForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {"model_type": "mistral"}}),
    ("LlavaQwenForCausalLM", {"vision_config": {"x": 1}}),
    ("PixtralForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {}}),
    ("DeepseekVL2ForCausalLM", {"vision_config": {"x": 1}, "language_config": {"kv_lora_rank": 512}}),
    ("Qwen3ASRForConditionalGeneration", {"thinker_config": {"audio_config": {"x": 1}, "text_config": {"x": 1}}}),
    (
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"vision_config": {"x": 1}, "rope_scaling": {"type": "default", "mrope_section": [22, 22, 20]}},
    ),
    (
        "Step3p7ForConditionalGeneration",
        {"vision_config": {"x": 1}, "text_config": {"layer_types": [FULL, SLIDING], "sliding_window": 512}},
    ),
    ("Mistral3ForConditionalGeneration", {"vision_config": {"x": 1}, "text_config": {"sliding_window": None}}),
]


def check(folder, config, **overrides):
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"model_path": str(folder), "revision": None, "json_model_override_args": json.dumps(overrides)}
    check_model_file(SimpleNamespace(**settings))


@pytest.mark.parametrize(("architecture", "fields", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_families(tmp_path, architecture, fields, words):
    """Prevents loading weights for a model that cannot be compressed or, worse, compressing it wrongly."""
    with pytest.raises(TriAttentionError, match=architecture) as caught:
        check(tmp_path, BASE | {"architectures": [architecture], "model_type": architecture.lower()} | fields)
    assert words in str(caught.value)
    assert str(caught.value).count(": ") == 1


@pytest.mark.parametrize(
    "place",
    [("text_config",), ("llm_config",), ("language_config",), ("thinker_config",), ("thinker_config", "text_config")],
)
def test_the_text_model_is_found(tmp_path, place):
    """Prevents judging the fields of an encoder, or none, where a file has the text model in an object of its own."""
    inner = {"rope_scaling": {"type": "ntk", "factor": 2.0}}
    for name in reversed(place):
        inner = {name: inner}
    with pytest.raises(TriAttentionError, match="of the kind ntk"):
        check(tmp_path, BASE | inner | {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]})


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_families(tmp_path, name):
    """Prevents refusing a working model for a field that transformers writes into every file of its kind."""
    config = getattr(transformers, f"{name}Config")().to_dict()
    check(tmp_path, config | {"architectures": [f"{name}ForCausalLM"]})


@pytest.mark.parametrize(("architecture", "fields"), ACCEPTED_FIELDS, ids=str)
def test_harmless_fields(tmp_path, architecture, fields):
    """Prevents refusing a model for a field that is off, or that SGLang ignores."""
    model_type = architecture.removesuffix("ForCausalLM").lower()
    check(tmp_path, BASE | {"architectures": [architecture], "model_type": model_type} | fields)


def test_overrides_count(tmp_path):
    """Prevents checking other settings than those that are served."""
    with pytest.raises(TriAttentionError, match="local to chunks"):
        check(tmp_path, BASE, attention_chunk_size=8192)


@pytest.mark.parametrize("content", [None, "{", "[]", '{"architectures": null}'])
def test_other_files_are_left_to_sglang(tmp_path, content):
    """Prevents a traceback, or a refusal for the wrong reason, if there is no file or an unreadable one."""
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    settings = {"model_path": str(tmp_path), "revision": None, "json_model_override_args": "{}"}
    check_model_file(SimpleNamespace(**settings))


def test_a_plain_model_has_no_reason():
    """Prevents a check that refuses everything."""
    assert uncovered_in_file(BASE) == {}
