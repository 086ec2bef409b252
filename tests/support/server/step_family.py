"""A random Step-3.5 model.

transformers knows its layers as those of Step-3.7, without a head. The account is these layers and a head of its own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import Step3p7TextConfig, Step3p7TextModel

from families import ALTERNATING, COMMON, HEAD_DIM, HEADS, KV_HEADS, LAYERS, OWN_CONFIG, WINDOW
from tiny_model import TinyModel

WINDOW_HEADS = 6
EXPERTS = 4
# As published. The lists continue after the layers, with those that only draft tokens.
FIELDS = {
    **{name: value for name, value in COMMON.items() if name not in ("num_key_value_heads", "tie_word_embeddings")},
    "num_attention_groups": KV_HEADS,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": WINDOW_HEADS,
        "num_attention_groups": KV_HEADS,
        "head_dim": HEAD_DIM,
    },
    "layer_types": [*ALTERNATING, "sliding_attention"],
    "sliding_window": WINDOW,
    "rope_theta": [1e4, 5e6] * (LAYERS // 2) + [1e4],
    "partial_rotary_factors": [1.0, 0.5] * (LAYERS // 2) + [1.0],
    "yarn_only_types": ["full_attention"],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
        "original_max_position_embeddings": 64,
    },
    "num_nextn_predict_layers": 1,
    "use_head_wise_attn_gate": True,
    "rms_norm_eps": 1e-5,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": EXPERTS,
    "moe_top_k": 2,
    "moe_intermediate_size": 64,
    "share_expert_dim": 64,
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "swiglu_limits": [0.0, 0.0, 0.0, 0.5, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 0.5, 0.0, 0.0],
}
# Where the published weights have the names of transformers' parameters, and what these are there.
PUBLISHED = {
    "mlp.gate.e_score_correction_bias": "moe.router_bias",
    "mlp.gate.": "moe.gate.",
    "mlp.shared_experts.": "share_expert.",
    "mlp.experts.down_proj": "moe.down_proj.weight",
}


class Account(torch.nn.Module):
    """What the oracle needs of a model: its layers in `model`, and a call that returns logits."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = Step3p7TextModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        self.config = self.model.config
        self.head = load_file(folder / "head.safetensors")["weight"]

    def forward(self, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(logits=self.model(**options).last_hidden_state @ self.head.T)


class Step(TinyModel):
    def load(self) -> Account:
        return Account(self.path / "account")


def build_step(folder: Path) -> Step:
    """Writes the model. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    return write_step(folder / "step-3.5", FIELDS, *random_step(FIELDS))


def random_step(fields: dict[str, Any]) -> tuple[Step3p7TextModel, torch.Tensor]:
    """A model, and its head."""
    model = Step3p7TextModel._from_config(Step3p7TextConfig(**fields), dtype=torch.float32)
    head = torch.randn(fields["vocab_size"], fields["hidden_size"]) * fields["initializer_range"]
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            # Norms and biases are all equal in a new model, and would hide that they are not applied.
            if "norm" in name or name.endswith("bias"):
                value.add_(0.1 * torch.randn_like(value))
    return model, head


def write_step(
    path: Path,
    fields: dict[str, Any],
    model: Step3p7TextModel,
    head: torch.Tensor,
    added: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> Step:
    """Writes a model with this configuration, and what its account needs.

    Args:
        added: further weights, by their published names.
    """
    model.save_pretrained(path / "account")
    save_file({"weight": head}, path / "account" / "head.safetensors")
    weights = {"lm_head.weight": head, **published(model), **added}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    own = {"auto_map": {"AutoConfig": "configuration.OwnConfig"}, "model_type": "step3p5", "dtype": "float32"}
    (path / "config.json").write_text(json.dumps({**fields, **own, "architectures": ["Step3p5ForCausalLM"]}))
    (path / "configuration.py").write_text(OWN_CONFIG)
    sizes = fields["num_hidden_layers"], HEADS, KV_HEADS, HEAD_DIM
    return Step(path, path.parent / f"{path.name}.safetensors", *sizes)


def published(model: Step3p7TextModel) -> dict[str, torch.Tensor]:
    """The model's weights under their published names."""
    weights = {}
    for name, value in model.state_dict().items():
        for old, new in PUBLISHED.items():
            name = name.replace(old, new)
        if name.endswith("experts.gate_up_proj"):
            layer = name.removesuffix("mlp.experts.gate_up_proj")
            for part, half in zip(("gate", "up"), value.chunk(2, dim=1), strict=True):
                weights[f"model.{layer}moe.{part}_proj.weight"] = half.contiguous()
        else:
            weights[f"model.{name}"] = value.clone()
    return weights
