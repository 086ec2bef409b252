"""Random models of families whose attention differs from a Llama's in one thing or more."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from state_settings import STATE_FAMILIES
from tiny_model import END, VOCABULARY, TinyModel

WINDOW = 48
"""Tokens that a query of a window layer sees, its own included."""

LAYERS, HEADS, KV_HEADS, HEAD_DIM = 4, 4, 2, 32
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 8192,
    "initializer_range": 0.12,
    "bos_token_id": 1,
    "eos_token_id": END,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64}
BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
GEMMA = {"sliding_window": WINDOW, "query_pre_attn_scalar": HEAD_DIM, "tie_word_embeddings": True}
ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


# As published: the configuration comes with the model, because that of transformers has other names for its fields.
OWN_CONFIG = """from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "own"

    def __init__(self, rope_theta=10000, rope_scaling=None, **options):
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        super().__init__(**options)
"""


@dataclass(frozen=True)
class Family:
    """
    Attributes:
        config: name of its configuration class in transformers.
        settings: what differs from COMMON.
        module: SGLang's module of the model.
        written: fields that its file has in place of those that transformers writes; None for no such field.
        seed: of the weights. A model whose first layer is scored must hardly repeat itself: between the equal values of
            two equal tokens, the order in a row would choose, which an account does not know.
        code: the module of the configuration that comes with the model, for --trust-remote-code.
        latent_halves: of latent KV, RoPE pairs the halves of a rotated key also in SGLang's pool.
    """

    config: str
    module: str
    settings: dict[str, Any]
    written: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    code: str = ""
    latent_halves: bool = False


FAMILIES = {
    "llama": Family("LlamaConfig", "llama", {"rope_parameters": PLAIN_ROPE}),
    # Both dims of a pair have weights of their own in the norms that follow the rotation.
    "hunyuan": Family(
        "HunYuanDenseV1Config",
        "hunyuan",
        {
            "use_qk_norm": True,
            "use_cla": False,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "gemma2": Family(
        "Gemma2Config",
        "gemma2",
        {
            **GEMMA,
            # SGLang reads the old name of the activation, which published configurations have too.
            "hidden_act": "gelu_pytorch_tanh",
            # Bounds that random scores and logits come near to.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 5.0,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "gemma3": Family(
        "Gemma3TextConfig",
        "gemma3_causal",
        {
            **GEMMA,
            "layer_types": ALTERNATING,
            "rope_parameters": {
                "sliding_attention": PLAIN_ROPE,
                "full_attention": {"rope_type": "default", "rope_theta": 1e6},
            },
        },
    ),
    "olmo3": Family(
        "Olmo3Config",
        "olmo2",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING},
        # As published: SGLang does not read the other form.
        {"rope_parameters": None, "rope_theta": 500000.0},
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        "gpt_oss",
        {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {**YARN, **BETAS, "truncate": False},
        },
    ),
    "mimo-v2": Family(
        "MiMoV2FlashConfig",
        "mimo_v2",
        {
            # The first and the last one have no window.
            "num_hidden_layers": 6,
            "head_dim": 48,
            "v_head_dim": 32,
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
        },
        # As published, which transformers completes and SGLang reads.
        {
            "layer_types": None,
            "mlp_layer_types": None,
            "rope_parameters": None,
            "rope_theta": 5000000,
            "swa_rope_theta": 10000,
            "partial_rotary_factor": 0.334,
            "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1, 1, 1],
            "sliding_window_size": WINDOW,
            "swa_num_attention_heads": HEADS,
            "swa_num_key_value_heads": 2 * KV_HEADS,
            "swa_head_dim": 48,
            "swa_v_head_dim": 32,
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "layernorm_epsilon": 1e-5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "auto_map": {"AutoConfig": "configuration.OwnConfig"},
        },
        seed=1,
        code=OWN_CONFIG,
    ),
    "mellum": Family(
        "MellumConfig",
        "mellum",
        {
            "moe_intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": {**YARN, **BETAS}},
        },
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        "deepseek_v2",
        {
            "num_key_value_heads": HEADS,
            "q_lora_rank": 48,
            "kv_lora_rank": 40,
            "qk_nope_head_dim": 24,
            "qk_rope_head_dim": 16,
            "head_dim": 16,
            "v_head_dim": 20,
            "moe_intermediate_size": 64,
            "n_routed_experts": 8,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "first_k_dense_replace": 1,
            "num_mtp_layers": 0,
            # Of published configurations, unknown to transformers, and read by SGLang.
            "moe_layer_freq": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "rope_parameters": {**YARN, **BETAS, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
    ),
    "exaone4": Family(
        "Exaone4Config",
        "exaone4",
        {
            "sliding_window": WINDOW,
            "sliding_window_pattern": "LG",
            "layer_types": ALTERNATING,
            # What SGLang's norms of queries and keys always have.
            "rms_norm_eps": 1e-6,
            # SGLang's default; it does not read the newer form of the file.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
        },
    ),
    "cohere2": Family(
        "Cohere2Config",
        "commandr",
        {
            "sliding_window": WINDOW,
            "layer_types": ALTERNATING,
            "rope_parameters": PLAIN_ROPE,
            "logit_scale": 1.0,
            "tie_word_embeddings": True,
        },
    ),
    # SGLang serves the next three through the modules of transformers.
    "seed-oss": Family("SeedOssConfig", "transformers", {"rope_parameters": PLAIN_ROPE}),
    "smollm3": Family(
        "SmolLM3Config",
        "transformers",
        {"rope_parameters": PLAIN_ROPE, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False},
    ),
    "dots1": Family(
        "Dots1Config",
        "transformers",
        {
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "sliding_window": None,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "qwen3-moe": Family(
        "Qwen3MoeConfig",
        "qwen3_moe",
        {
            "moe_intermediate_size": 64,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
            "rope_parameters": PLAIN_ROPE,
        },
    ),
    "glm-4.5": Family(
        "Glm4MoeConfig",
        "glm4_moe",
        {
            "moe_intermediate_size": 64,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "routed_scaling_factor": 1.5,
            "use_qk_norm": True,
            "attention_bias": True,
            "num_mtp_layers": 0,
            "rope_parameters": {**PLAIN_ROPE, "partial_rotary_factor": 0.5},
        },
    ),
}
FAMILIES |= {name: Family(*parts) for name, parts in STATE_FAMILIES.items()}
# Every token takes every expert, so that no rounding decides which.
_EVERY = {**FAMILIES["qwen3-moe"].settings, "num_experts_per_tok": 4}
FAMILIES["glm-4.5-all"] = replace(
    FAMILIES["glm-4.5"], settings={**FAMILIES["glm-4.5"].settings, "num_experts_per_tok": 4}
)
FAMILIES["qwen3-moe-all"] = replace(FAMILIES["qwen3-moe"], settings=_EVERY, seed=4)
# As many KV heads as there are ranks, because SGLang adds what is missing on CPUs.
_WIDE = {**_EVERY, "num_attention_heads": 2 * HEADS, "num_key_value_heads": 2 * KV_HEADS}
FAMILIES["qwen3-moe-wide"] = replace(FAMILIES["qwen3-moe"], settings=_WIDE, seed=4)


def config_of(family: str) -> transformers.PreTrainedConfig:
    """Its configuration, which names no architecture yet."""
    found = FAMILIES[family]
    return getattr(transformers, found.config)(**{**COMMON, **found.settings})


def build_family(folder: Path, family: str) -> TinyModel:
    """Writes the model. Nothing has written its statistics yet."""
    torch.manual_seed(FAMILIES[family].seed)
    model = transformers.AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Norms and biases are all equal in a new model, and would hide that they are not applied.
            if parameter.ndim == 1 or name.endswith("bias"):
                parameter.add_(0.1 * torch.randn_like(parameter))
            if name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
                # Those after a rotation, so that the weights of a pair differ by more than a rounding.
                parameter.uniform_(0.5, 1.5)
            if name.endswith("sinks"):
                # SGLang holds them in bfloat16.
                parameter.copy_(torch.randn_like(parameter).bfloat16())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder / family)
    file = folder / family / "config.json"
    fields = {**json.loads(file.read_text()), **FAMILIES[family].written}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    if FAMILIES[family].code:
        (folder / family / "configuration.py").write_text(FAMILIES[family].code)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads, fields.get("head_dim", 0)
    return TinyModel(folder / family, folder / f"{family}.safetensors", model.config.num_hidden_layers, *heads)
