"""A model with hand-made weights that recalls: one layer whose question looks for the one fact among fillers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

FACTS, QUESTION, FILLER = 8, 8, 9
"""Tokens 0 to 7 are facts and, as answers, their values; then come the question and a filler that says nothing."""
_WIDTH = 32
# A dim of a head that RoPE hardly rotates, at this theta.
_SLOW, _THETA = 15, 1e9
_IS_FACT, _IS_QUESTION = 30, 31


def recalling_model() -> LlamaForCausalLM:
    """After a question comes the fact that attention finds; if there is none, token 0."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=_WIDTH,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=_WIDTH,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": _THETA},
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.fill_(1.0 if "norm" in name else 0.0)
        layer, embedding = model.model.layers[0].self_attn, model.model.embed_tokens.weight
        for value in range(FACTS):
            # Dims 0 to 7 of a token are a fact's value, dims 8 to 15 the coming answer.
            embedding[value, value] = embedding[value, _IS_FACT] = 1
            layer.v_proj.weight[value, value] = 1
            layer.o_proj.weight[FACTS + value, value] = 1
            model.lm_head.weight[value, FACTS + value] = 1
        embedding[QUESTION, _IS_QUESTION] = 1
        # Norms need something to divide by.
        embedding[FILLER, 20] = 1
        layer.q_proj.weight[_SLOW, _IS_QUESTION] = 10
        layer.k_proj.weight[_SLOW, _IS_FACT] = 10
    return model
