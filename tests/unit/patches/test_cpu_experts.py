"""Experts with bounded gates on CPUs, against transformers."""

from types import SimpleNamespace

import torch
from transformers import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from sglang_triattn.patches.cpu.experts import _bounded, bounded_experts

LIMIT, TOKENS, EXPERTS, CHOSEN = 0.3, 9, 5, 2


def experts(limit: float | None) -> tuple[Step3p7Experts, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A module of transformers, and what it is called with."""
    torch.manual_seed(0)
    config = Step3p7TextConfig(hidden_size=16, moe_intermediate_size=8, n_routed_experts=EXPERTS)
    module = Step3p7Experts(config, swiglu_limit=limit)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.rand(TOKENS, EXPERTS).argsort(-1)[:, :CHOSEN]
    return module, torch.randn(TOKENS, 16), ids, torch.rand(TOKENS, CHOSEN)


@torch.no_grad()
def test_bounds_are_those_of_transformers():
    """Prevents answers of a model without the bounds that it was trained with."""
    module, x, ids, weights = experts(LIMIT)
    expected = module(x, ids, weights)
    found = bounded_experts(x, module.gate_up_proj, module.down_proj, weights, ids, LIMIT)
    torch.testing.assert_close(found, expected)
    free, *_ = experts(None)
    assert (free(x, ids, weights) - expected).abs().max() > 0.1


def test_other_experts_stay_with_sglang():
    """Prevents experts of another kind from being computed as these."""
    bounded = _bounded(lambda *given: "original")
    plain = {
        "activation": "silu",
        "gemm1_alpha": None,
        "gemm1_clamp_limit": None,
        "apply_router_weight_on_input": False,
    }
    for other in ({}, {"gemm1_clamp_limit": 7.0, "activation": "situ"}, {"gemm1_clamp_limit": 7.0, "gemm1_alpha": 1.7}):
        assert bounded(None, None, None, SimpleNamespace(**{**plain, **other})) == "original"
