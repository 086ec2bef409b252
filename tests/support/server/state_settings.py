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
