"""Random models of further decoders with rotary embeddings, each of an architecture of its own in SGLang."""

from __future__ import annotations

from families import ALTERNATING, BETAS, FAMILIES, KV_HEADS, PLAIN_ROPE, WINDOW, YARN, Family
from state_settings import LFM2
from tiny_model import VOCABULARY

_ROPE = {"rope_parameters": PLAIN_ROPE}
_HALF = {"rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5}, "partial_rotary_factor": 0.5}
_WINDOWS = {**_ROPE, "sliding_window": WINDOW, "layer_types": ALTERNATING}
# Full layers without RoPE.
_STILL = {"sliding_window": WINDOW, "layer_types": ALTERNATING, "layer_rope_theta": [10000, 0] * 2}
SHORT_CONTEXT = 2048
# Every token takes every expert, so that no rounding decides which.
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 64}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 64}
_GRANITE = {**_ROPE, "attention_multiplier": 0.2, "residual_multiplier": 0.5, "logits_scaling": 2.0}

DECODERS = {
    "hunyuan-moe": Family(
        "HunYuanMoEV1Config",
        "hunyuan",
        {
            **FAMILIES["hunyuan"].settings,
            **{"num_experts": 4, "moe_topk": 4, "moe_intermediate_size": 256},
            **{"use_mixed_mlp_moe": True, "num_shared_expert": 1},
        },
    ),
    "arcee": Family("ArceeConfig", "arcee", {**_ROPE, "hidden_act": "relu2"}),
    "gemma": Family("GemmaConfig", "gemma", {**_ROPE, "hidden_act": "gelu", "tie_word_embeddings": True}),
    # transformers has another name for its architecture than the published files.
    "ernie-4.5": Family("Ernie4_5Config", "ernie4", _ROPE, {"architectures": ["Ernie4_5_ForCausalLM"]}),
    "exaone-moe": Family(
        "ExaoneMoeConfig",
        "exaone_moe",
        {
            **_WINDOWS,
            **_EXPERTS,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "num_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
        {"is_moe_layer": [False, True, True, True]},
    ),
    "cohere": Family("CohereConfig", "commandr", {**_ROPE, "logit_scale": 1.0, "tie_word_embeddings": True}),
    "cohere2-moe": Family(
        "Cohere2MoeConfig",
        "cohere2_moe",
        {**_WINDOWS, **_EXPERTS, "logit_scale": 1.0, "tie_word_embeddings": True},
    ),
    "granite": Family("GraniteConfig", "granite", _GRANITE),
    "granite-moe": Family("GraniteMoeConfig", "granitemoe", {**_GRANITE, **_LOCAL_EXPERTS}),
    "granite-moe-shared": Family(
        "GraniteMoeSharedConfig", "granitemoe", {**_GRANITE, **_LOCAL_EXPERTS, "shared_intermediate_size": 64}
    ),
    "olmo": Family("OlmoConfig", "olmo", {**_ROPE, "num_key_value_heads": 4}),
    "olmo2": Family("Olmo2Config", "olmo2", _ROPE),
    "olmoe": Family(
        "OlmoeConfig", "olmoe", {**_ROPE, **_EXPERTS, "num_key_value_heads": 4, "intermediate_size": 64}, seed=1
    ),
    "persimmon": Family("PersimmonConfig", "persimmon", {**_HALF, "num_key_value_heads": 4}),
    "stablelm": Family("StableLmConfig", "stablelm", _HALF),
    "lfm2-moe": Family(
        "Lfm2MoeConfig",
        "lfm2_moe",
        {**LFM2, **_EXPERTS, "num_dense_layers": 1, "num_key_value_heads": KV_HEADS},
    ),
    # Served in the context in which LongRoPE keeps its frequencies.
    "phi3": Family(
        "Phi3Config",
        "llama",
        {
            "rope_parameters": {
                **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
                "short_factor": [1 + 0.1 * number for number in range(12)],
                "long_factor": [2.0 + number for number in range(12)],
            },
            "original_max_position_embeddings": SHORT_CONTEXT,
            "partial_rotary_factor": 0.75,
        },
    ),
    "glm4": Family("Glm4Config", "glm4", _HALF),
    "granite-swa": Family("GraniteSWAConfig", "granite", {**_GRANITE, **_STILL}),
    "granite-moe-swa": Family("GraniteMoeSWAConfig", "granitemoe", {**_GRANITE, **_STILL, **_LOCAL_EXPERTS}),
    "laguna": Family(
        "LagunaConfig",
        "laguna",
        {
            **_EXPERTS,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "num_attention_heads_per_layer": [6, 4] * 2,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": {
                "full_attention": {**YARN, **BETAS, "partial_rotary_factor": 0.5},
                "sliding_attention": {**PLAIN_ROPE, "partial_rotary_factor": 1.0},
            },
        },
    ),
    "gemma3n": Family(
        "Gemma3nTextConfig",
        "gemma3n_causal",
        {
            "num_hidden_layers": 6,
            # The last two read the KV of the two before them.
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 2,
            "sliding_window": WINDOW,
            "hidden_size_per_layer_input": 16,
            "vocab_size_per_layer_input": VOCABULARY,
            "altup_num_inputs": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.0] * 6,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "sliding_attention": PLAIN_ROPE,
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "afmoe": Family(
        "AfmoeConfig",
        "afmoe",
        {**_WINDOWS, "num_dense_layers": 4},
    ),
}
FAMILIES |= DECODERS
INTERLEAVED = ("ernie-4.5", "cohere", "cohere2-moe", "glm4")
