"""A random Nemotron-NAS model, some of whose layers have no attention or no feed-forward network.

transformers has no such class. Its account is a Llama in which these parts are there, and add nothing.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from families import COMMON, HEAD_DIM, HEADS, KV_HEADS, LAYERS, PLAIN_ROPE
from tiny_model import TinyModel

WITHOUT_ATTENTION, WITHOUT_FEED_FORWARD = 1, 2
# As published, the configuration comes with the model.
CODE = """from transformers import LlamaConfig


class Block(dict):
    def __init__(self, fields):
        super().__init__(fields)
        for name, value in fields.items():
            setattr(self, name, Block(value) if isinstance(value, dict) else value)


class DeciLMConfig(LlamaConfig):
    model_type = "nemotron-nas"

    def __init__(self, block_configs=(), **options):
        super().__init__(**options)
        self.block_configs = [Block(block) for block in block_configs]
"""


class NemotronNas(TinyModel):
    def load(self) -> LlamaForCausalLM:
        return LlamaForCausalLM.from_pretrained(self.path / "account", attn_implementation="eager").eval()


def build_nemotron_nas(folder: Path) -> NemotronNas:
    """Writes the model, which needs --trust-remote-code. Nothing has written its statistics yet."""
    torch.manual_seed(0)
    config = LlamaConfig(**COMMON, rope_parameters=PLAIN_ROPE)
    model = LlamaForCausalLM(config)
    layers = model.model.layers
    with torch.no_grad():
        layers[WITHOUT_ATTENTION].self_attn.o_proj.weight.zero_()
        layers[WITHOUT_FEED_FORWARD].mlp.down_proj.weight.zero_()
    path = folder / "nemotron-nas"
    model.save_pretrained(path / "account")
    missing = (
        *(f"model.layers.{WITHOUT_ATTENTION}.{part}." for part in ("self_attn", "input_layernorm")),
        *(f"model.layers.{WITHOUT_FEED_FORWARD}.{part}." for part in ("mlp", "post_attention_layernorm")),
    )
    weights = {name: value.clone() for name, value in model.state_dict().items() if not name.startswith(missing)}
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    fields = json.loads((path / "account" / "config.json").read_text()) | {
        "architectures": ["DeciLMForCausalLM"],
        "model_type": "nemotron-nas",
        "auto_map": {"AutoConfig": "configuration_decilm.DeciLMConfig"},
        "block_configs": [
            {
                "attention": {"no_op": number == WITHOUT_ATTENTION, "n_heads_in_group": HEADS // KV_HEADS},
                "ffn": {"no_op": number == WITHOUT_FEED_FORWARD, "ffn_mult": 3.0},
            }
            for number in range(LAYERS)
        ],
    }
    (path / "config.json").write_text(json.dumps(fields))
    (path / "configuration_decilm.py").write_text(CODE)
    return NemotronNas(path, folder / "nemotron-nas.safetensors", LAYERS, HEADS, KV_HEADS, HEAD_DIM)
