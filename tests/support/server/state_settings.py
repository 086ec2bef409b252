"""Settings of random models with layers that keep a state instead of KV; `families` builds them."""

from __future__ import annotations

from typing import Any

QWEN3_NEXT: dict[str, Any] = {
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "num_experts": 4,
    # Every expert, so that no rounding decides which.
    "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
# As published, which SGLang reads and transformers completes.
QWEN3_NEXT_WRITTEN: dict[str, Any] = {"full_attention_interval": 4, "layer_types": None}

# With more layers that are scored than a draft layer has.
QWEN3_NEXT_TWICE = {**QWEN3_NEXT, "layer_types": ["linear_attention", "full_attention"] * 2}

LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention"] * 2,
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

QWEN3_5: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

# A state in addition to the KV of each layer.
FALCON_H1: dict[str, Any] = {
    "mamba_d_ssm": 128,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_chunk_size": 64,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "key_multiplier": 0.9,
    "attention_out_multiplier": 1.1,
    "attention_in_multiplier": 0.8,
    "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
    "ssm_in_multiplier": 1.1,
    "ssm_out_multiplier": 0.9,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
# As published, which SGLang reads.
FALCON_H1_WRITTEN: dict[str, Any] = {"rope_theta": 10000.0}

GRANITE_4_H: dict[str, Any] = {
    "layer_types": ["mamba", "attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    # As published; transformers and SGLang differ with more.
    "mamba_n_groups": 1,
    "mamba_d_state": 24,
    "mamba_chunk_size": 64,
    "position_embedding_type": "nope",
    "attention_multiplier": 0.2,
    "num_local_experts": 4,
    # Every expert, so that no rounding decides which.
    "num_experts_per_tok": 4,
    "shared_intermediate_size": 64,
}
GRANITE_4_H_WRITTEN: dict[str, Any] = {"layer_types": ["mamba", "attention"] * 2}

NEMOTRON_H: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layers_block_type": ["mamba", "attention", "mlp"] * 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 24,
    "chunk_size": 64,
}
NEMOTRON_H_WRITTEN: dict[str, Any] = {
    "hybrid_override_pattern": "M*-" * 2,
    "layers_block_type": None,
    # The name that SGLang reads.
    "mamba_n_groups": 2,
    "num_hidden_layers": 6,
    # transformers lets no time step be shorter; SGLang has no such bound.
    "time_step_min": 0.0,
}

# Configuration in transformers, SGLang's module, settings, and what the file has in place of what transformers writes.
STATE_FAMILIES: dict[str, tuple[Any, ...]] = {
    "qwen3-next": ("Qwen3NextConfig", "qwen3_next", QWEN3_NEXT, QWEN3_NEXT_WRITTEN),
    "qwen3-next-twice": (
        "Qwen3NextConfig",
        "qwen3_next",
        QWEN3_NEXT_TWICE,
        {**QWEN3_NEXT_WRITTEN, "full_attention_interval": 2},
    ),
    "qwen3.5": ("Qwen3_5TextConfig", "qwen3_5_text", QWEN3_5, {"full_attention_interval": 2}),
    "lfm2": ("Lfm2Config", "lfm2", LFM2),
    "falcon-h1": ("FalconH1Config", "falcon_h1", FALCON_H1, FALCON_H1_WRITTEN),
    "granite-4-h": ("GraniteMoeHybridConfig", "granitemoehybrid", GRANITE_4_H, GRANITE_4_H_WRITTEN),
    "nemotron-h": ("NemotronHConfig", "nemotron_h", NEMOTRON_H, NEMOTRON_H_WRITTEN),
}
