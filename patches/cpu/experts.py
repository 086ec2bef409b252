"""Experts whose gates and inputs are bounded (Step-3.5), which SGLang's torch path for CPUs leaves unbounded.

SGLang part: `moe_forward_native` (sglang/srt/layers/moe/fused_moe_native.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput


def install() -> None:
    """Puts bounded experts before SGLang's function, which its CPU path imports when it runs."""
    from sglang.srt.layers.moe import fused_moe_native

    fused_moe_native.moe_forward_native = _bounded(fused_moe_native.moe_forward_native)


def _bounded(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def forward(
        layer: torch.nn.Module, x: torch.Tensor, topk_output: StandardTopKOutput, moe_runner_config: MoeRunnerConfig
    ) -> torch.Tensor:
        limit = moe_runner_config.gemm1_clamp_limit
        others = moe_runner_config.activation != "silu" or moe_runner_config.gemm1_alpha is not None
        if limit is None or others or moe_runner_config.apply_router_weight_on_input:
            return original(layer, x, topk_output, moe_runner_config)
        inner, outer = (cast(torch.Tensor, weight) for weight in (layer.w13_weight, layer.w2_weight))
        return bounded_experts(x, inner, outer, topk_output[0], topk_output[1], limit)

    return forward


def bounded_experts(
    x: torch.Tensor, inner: torch.Tensor, outer: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, limit: float
) -> torch.Tensor:
    """The weighted sum of each token's experts: outer @ (min(silu(gate), limit) * clamp(up, -limit, limit)).

    Args:
        x: [tokens, hidden].
        inner: [experts, 2 * width, hidden], gate before up.
        outer: [experts, hidden, width].
        weights, ids: [tokens, k], of each token's experts.

    Returns:
        [tokens, hidden] in the dtype of `x`.
    """
    found = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, rank = (ids == expert).nonzero(as_tuple=True)
        gate, up = functional.linear(x[token], inner[expert]).chunk(2, dim=-1)
        hidden = functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
        share = weights[token, rank, None].to(x.dtype)
        found.index_add_(0, token, functional.linear(hidden, outer[expert]) * share)
    return found
