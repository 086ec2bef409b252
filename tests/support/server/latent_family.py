"""Random models with latent KV (MLA): how they are built, and the account of what they keep."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    DynamicCache,
    Mistral4Config,
    Mistral4ForCausalLM,
)

from families import BETAS, COMMON, FAMILIES, HEADS, LAYERS, PLAIN_ROPE, YARN, Family, build_family
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
    latent_halves=True,
)
# transformers knows it as a part of models with images alone.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)
_MISTRAL_YARN = {**YARN, **BETAS, "original_max_position_embeddings": COMMON["max_position_embeddings"]}
_MISTRAL_YARN |= {"mscale": 1.0, "mscale_all_dim": 1.0}
FAMILIES["mistral-large"] = replace(
    _LATENT,
    config="Mistral4Config",
    module="mistral_large_3",
    settings={
        **{name: value for name, value in _LATENT.settings.items() if name not in ("num_mtp_layers", "moe_layer_freq")},
        "n_group": 1,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_routed_experts": 4,
        "rms_norm_eps": 1e-6,
        # Of which RoPE turns a share.
        "head_dim": 40,
        "rope_parameters": {**_MISTRAL_YARN, "llama_4_scaling_beta": 0.1},
    },
    # As SGLang reads the published file.
    written={
        "architectures": ["MistralLarge3ForCausalLM"],
        "model_type": "deepseek_v3",
        "head_dim": 16,
        "rope_parameters": _MISTRAL_YARN,
        "llama_4_scaling": {"original_max_position_embeddings": COMMON["max_position_embeddings"], "beta": 0.1},
        **{"topk_method": "greedy", "scoring_func": "softmax", "moe_layer_freq": 1},
    },
)
# The names of published weights, by those of transformers.
_MISTRAL_NAMES = {
    "model.": "",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn": "attention",
    "q_a_proj": "wq_a",
    "q_b_proj": "wq_b",
    "q_a_layernorm": "q_a_norm",
    "kv_a_proj_with_mqa": "wkv_a_with_mqa",
    "kv_a_layernorm": "kv_a_norm",
    "kv_b_proj": "wkv_b",
    "o_proj": "wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "gate_proj": "w1",
    "down_proj": "w2",
    "up_proj": "w3",
    "mlp.": "",
    "embed_tokens": "tok_embeddings",
    "lm_head": "output",
}
LATENT_FAMILIES = ("deepseek-v3", "kimi-k2", "glm-4.7-flash", "deepseek-v2", "kimi-linear", "minicpm3", "mistral-large")


OF_TRANSFORMERS = "transformers"


class Latent(TinyModel):
    """What a pool holds of each token is one head: the latent, followed by the rotated key."""

    def load(self) -> Any:
        if (self.path / OF_TRANSFORMERS).exists():
            return TinyModel(self.path / OF_TRANSFORMERS, self.stats).load()
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
    if family == "mistral-large":
        _publish(tiny.path)
    width = settings["kv_lora_rank"] + settings["qk_rope_head_dim"]
    return Latent(tiny.path, tiny.stats, tiny.num_layers, tiny.num_q_heads, 1, width, interleaved=True)


def _publish(folder: Path) -> None:
    """Gives the weights of a Mistral-Large-3 their published names; a folder inside keeps what transformers reads."""
    other = folder / OF_TRANSFORMERS
    other.mkdir()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(other / "model.safetensors")
    fields = json.loads((folder / "config.json").read_text())
    own = {"model_type": "mistral4", "architectures": ["Mistral4ForCausalLM"]}
    own |= {name: FAMILIES["mistral-large"].settings[name] for name in ("head_dim", "rope_parameters")}
    (other / "config.json").write_text(json.dumps({**fields, **own}))
    renamed = {}
    for name in [name for name in weights if ".mlp.experts." in name]:
        for number, expert in enumerate(weights.pop(name)):
            parts = {"down_proj": expert}
            if name.endswith("gate_up_proj"):
                parts = dict(zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True))
            for part, value in parts.items():
                weights[f"{name.rsplit('.', 1)[0]}.{number}.{part}.weight"] = value.contiguous()
    for name, value in weights.items():
        for old, new in _MISTRAL_NAMES.items():
            name = name.replace(old, new)
        renamed[name] = value
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})


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
