"""Random models with latent KV (MLA): how they are built, and the account of what they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from families import COMMON, FAMILIES, HEADS, LAYERS, PLAIN_ROPE, YARN, Family, build_family
from oracle import Oracle
from sglang_triattn.model.rope import Rope
from tiny_model import TinyModel

_LATENT = FAMILIES["deepseek-v3"]
FAMILIES["kimi-k2"] = replace(
    _LATENT,
    settings={
        **_LATENT.settings,
        "n_group": 1,
        # Unlike the published one, so that cosines and sines are scaled.
        "rope_parameters": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5},
    },
    written={"model_type": "kimi_k2"},
)
FAMILIES["glm-4.7-flash"] = replace(
    _LATENT,
    config="Glm4MoeLiteConfig",
    module="glm4_moe_lite",
    settings={
        **_LATENT.settings,
        "n_group": 1,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "rope_parameters": PLAIN_ROPE,
    },
)
FAMILIES["deepseek-v2"] = replace(
    _LATENT,
    config="DeepseekV2Config",
    settings={
        **{name: value for name, value in _LATENT.settings.items() if name != "num_mtp_layers"},
        # On CPUs SGLang chooses experts otherwise than transformers does.
        "first_k_dense_replace": LAYERS,
    },
)
FAMILIES["kimi-linear"] = replace(
    _LATENT,
    config="KimiLinearConfig",
    module="kimi_linear",
    settings={
        **{name: _LATENT.settings[name] for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")},
        **{name: _LATENT.settings[name] for name in ("num_key_value_heads", "v_head_dim")},
        "layer_types": ["linear_attention", "full_attention"] * (LAYERS // 2),
        "mlp_layer_types": ["dense"] * LAYERS,
        "linear_head_dim": 16,
        "linear_num_heads": HEADS,
    },
    # As published.
    written={
        "linear_attn_config": {
            **{"kda_layers": [1, 3], "full_attn_layers": [2, 4]},
            **{"head_dim": 16, "num_heads": HEADS, "short_conv_kernel_size": 4},
        },
        "first_k_dense_replace": LAYERS,
        "mla_use_nope": True,
    },
)
FAMILIES["minicpm3"] = Family(
    "MiniCPM3Config",
    "minicpm3",
    {
        **{name: _LATENT.settings[name] for name in ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim")},
        **{name: _LATENT.settings[name] for name in ("num_key_value_heads", "qk_rope_head_dim", "head_dim")},
        # What SGLang takes for it, and what the inner norms of transformers always have.
        "v_head_dim": COMMON["hidden_size"] // HEADS,
        "rms_norm_eps": 1e-6,
        # As published: trained with its whole context.
        "rope_parameters": {
            **{"rope_type": "longrope", "rope_theta": 10000.0, "factor": 1.0},
            "short_factor": [1 + 0.1 * number for number in range(8)],
            "long_factor": [2.0 + number for number in range(8)],
            "original_max_position_embeddings": COMMON["max_position_embeddings"],
        },
    },
)
LATENT_FAMILIES = ("deepseek-v3", "kimi-k2", "glm-4.7-flash", "deepseek-v2", "kimi-linear", "minicpm3")


class Latent(TinyModel):
    """What a pool holds of each token is one head: the latent, followed by the rotated key."""

    def load(self) -> Any:
        fields = json.loads((self.path / "config.json").read_text())
        if fields["model_type"] != "kimi_k2":
            return super().load()
        # transformers does not know the name that Kimi-K2 has for the configuration of DeepSeek-V3.
        config = DeepseekV3Config(**{name: value for name, value in fields.items() if name != "model_type"})
        options = {"dtype": torch.float32, "attn_implementation": "eager"}
        return DeepseekV3ForCausalLM.from_pretrained(self.path, config=config, **options).eval()


def build_latent(folder: Path, family: str) -> Latent:
    """Writes the model. Nothing has written its statistics yet."""
    tiny, settings = build_family(folder, family), FAMILIES[family].settings
    if family == "kimi-linear":
        # transformers writes an MLP under the name that published files have for experts.
        weights = load_file(tiny.path / "model.safetensors")
        renamed = {name.replace("block_sparse_moe.", "mlp."): value for name, value in weights.items()}
        save_file(renamed, tiny.path / "model.safetensors", {"format": "pt"})
    width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    return Latent(tiny.path, tiny.stats, tiny.num_layers, tiny.num_q_heads, 1, width, interleaved=True)


def pool_rope(rope: Rope) -> Rope:
    """The rotation as SGLang's pool has it, given that of transformers, which separates the halves of pairs."""
    return replace(rope, style="interleaved") if rope.inv_freq.any() else rope


class LatentOracle(Oracle):
    """The account of a model whose cache in transformers holds latents as keys, and rotated keys as values.

    All heads read the one that is cached. `num_kv_heads` counts the tensor-parallel ranks, each of which keeps of its
    copy what its own heads choose.
    """

    def _keys(self, cache: DynamicCache, layer: int, head: int, places: torch.Tensor) -> torch.Tensor:
        held = cache.layers[self.scored[layer]]
        return torch.cat([held.values[0, 0, places], held.keys[0, 0, places]], dim=-1).double()

    def _values(self, cache: DynamicCache, layer: int, head: int, places: torch.Tensor) -> torch.Tensor:
        return cache.layers[self.scored[layer]].keys[0, 0, places].double()
