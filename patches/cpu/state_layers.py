"""Layers that keep a state instead of KV, on plain CPUs: torch in the place of kernels that are compiled for GPUs alone
(`convolution`, `delta_rule`).

SGLang parts: the kernels' modules in sglang/kernels/ops/attention and sglang/kernels/ops/mamba, from which the modules
of the models and of their attention backends import by name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from sglang_triattn.patches.cpu import convolution, delta_rule

if TYPE_CHECKING:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.configs.model_config import ModelConfig

# Set by the main process, which knows the model, for those that compute: these take what is replaced here before they
# know it.
_ENVIRONMENT = "SGLANG_TRIATTN_STATE_LAYERS"


def announce(model: ModelConfig) -> bool:
    """Whether layers of the model that is about to be served keep a state. Then the processes to come install torch."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    found = mambaish_config(model) is not None
    os.environ[_ENVIRONMENT] = str(int(found))
    return found


def install() -> None:
    """Called before SGLang imports its models, once in each process that computes; does nothing for other models."""
    if os.environ.get(_ENVIRONMENT) != "1":
        return
    from sglang.kernels.ops.attention import triton_gdn_fused_proj
    from sglang.kernels.ops.attention.fla import chunk, fused_norm_gate, fused_recurrent
    from sglang.kernels.ops.attention.linear import fused_gdn_gating
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.kernels.ops.mamba import causal_conv1d_triton

    causal_conv1d_triton.causal_conv1d_fn = convolution.prefill
    causal_conv1d_triton.causal_conv1d_update = convolution.decode
    triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat = delta_rule.split_groups
    fused_gdn_gating.fused_gdn_gating = delta_rule.gates
    chunk.chunk_gated_delta_rule = delta_rule.prefill
    fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode = delta_rule.decode
    fused_norm_gate.FusedRMSNormGated.forward = _gated_norm
    elementwise.fused_gate_sigmoid_mul_add = delta_rule.add_gated
    # Where the models put their norms. A torch that is built for CUDA asks CUDA, GPU or not, and raises.
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010


def _gated_norm(self: FusedRMSNormGated, x: torch.Tensor, g: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return delta_rule.gated_norm(x, g, self.weight, self.eps, self.activation)
