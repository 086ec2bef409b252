"""Random models that add embeddings of positions to those of tokens, and their account."""

from __future__ import annotations

import torch

from families import COMMON, FAMILIES, HEADS, LAYERS, Family
from oracle import Oracle

_GPT = {
    "n_positions": COMMON["max_position_embeddings"],
    "n_embd": COMMON["hidden_size"],
    "n_layer": LAYERS,
    "n_head": HEADS,
    "num_key_value_heads": HEADS,
    "tie_word_embeddings": True,
}
LEARNED = {
    "gpt2": Family("GPT2Config", "gpt2", _GPT),
    "gpt-bigcode": Family("GPTBigCodeConfig", "gpt_bigcode", {**_GPT, "num_key_value_heads": 1}),
    "opt": Family(
        "OPTConfig",
        "opt",
        {
            "ffn_dim": COMMON["intermediate_size"],
            "word_embed_proj_dim": COMMON["hidden_size"],
            "num_key_value_heads": HEADS,
            "init_std": COMMON["initializer_range"],
            "tie_word_embeddings": True,
        },
    ),
}
FAMILIES |= LEARNED


class LearnedOracle(Oracle):
    def _layers(self) -> torch.nn.ModuleList:
        return next(module for module in self.model.modules() if isinstance(module, torch.nn.ModuleList))
