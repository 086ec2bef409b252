"""Norms that follow the rotation, with a weight for each dim."""

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention

from sglang_triattn.model.rope import Rope, rotate
from sglang_triattn.patches.model.late_norm import without_weights
from sglang_triattn.patches.model.layers import AttentionLayer, UnsupportedModel
from sglang_triattn.patches.model.rotation import match_rotation

HEADS, HEAD_DIM, POSITION = 4, 32, 997
NORM = "query_layernorm"


def attention(number: int, weights: torch.Tensor | None) -> torch.nn.Module:
    """What SGLang has for a layer, with a norm of these weights."""
    module = torch.nn.Module()
    module.attn = RadixAttention(HEADS, HEAD_DIM, 1.0, HEADS, number)
    if weights is not None:
        norm = torch.nn.RMSNorm(HEAD_DIM)
        norm.weight.data.copy_(weights)
        module.add_module(NORM, norm)
    return module


def test_rotations_are_found_before_the_weights():
    """Prevents a refusal of Hunyuan, and weights taken from a layer that has none."""
    torch.manual_seed(0)
    rope = Rope(1e4 ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM), 1.0, HEAD_DIM, "half")
    model = torch.nn.ModuleList([attention(0, 0.5 + torch.rand(HEAD_DIM)), attention(1, None)])
    layers = [AttentionLayer(each.attn) for each in model]
    plain = torch.randn(HEADS, HEAD_DIM, dtype=torch.float64)
    pair = [rotate(plain[:, None], torch.tensor([position]), rope)[:, 0] for position in (0, POSITION)]
    weights = model[0].get_submodule(NORM).weight.detach().double()
    seen = [(pair[0] * weights, pair[1] * weights), (pair[0], pair[1])]
    found = match_rotation(without_weights(seen, layers, model, NORM), [0, 1], [rope], POSITION)
    assert found.rotates == (True, True)
    assert without_weights([None, None], layers, model, NORM) == [None, None]
    with pytest.raises(UnsupportedModel, match="layer 0 turns its queries in an unknown way"):
        match_rotation(seen, [0, 1], [rope], POSITION)
