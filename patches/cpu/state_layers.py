"""Layers that keep a state instead of KV, on plain CPUs: torch in the place of kernels that are compiled for GPUs alone
(`convolution`, `delta_rule`, `kimi_delta`, `state_space`).

SGLang parts: the kernels' modules in sglang/kernels/ops/attention and sglang/kernels/ops/mamba, from which the modules
of the models and of their attention backends import by name.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from sglang_triattn.patches.cpu import convolution, delta_rule, kimi_delta, state_space

if TYPE_CHECKING:
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.kernels.ops.attention.fla.layernorm_gated import RMSNorm
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.mem_cache.memory_pool import MambaPool

# Set by the main process, which knows the model, for those that compute: these take what is replaced here before they
# know it.
_ENVIRONMENT = "SGLANG_TRIATTN_STATE_LAYERS"


def announce(model: ModelConfig) -> None:
    """Has the processes to come install torch if layers of the model that is about to be served keep a state."""
    from sglang.srt.configs.hybrid_arch import mambaish_config

    os.environ[_ENVIRONMENT] = str(int(mambaish_config(model) is not None))


def install() -> None:
    """Called before SGLang imports its models, once in each process that computes; does nothing for other models."""
    if os.environ.get(_ENVIRONMENT) != "1":
        return
    from sglang.kernels.ops.attention import triton_gdn_fused_proj
    from sglang.kernels.ops.attention.fla import chunk, fused_norm_gate, fused_recurrent, kda, layernorm_gated
    from sglang.kernels.ops.attention.linear import fused_gdn_gating, fused_sigmoid_gating_recurrent
    from sglang.kernels.ops.elementwise import elementwise
    from sglang.kernels.ops.mamba import causal_conv1d_triton, mamba_state_scatter_triton
    from sglang.srt.layers.attention.mamba import mamba

    causal_conv1d_triton.causal_conv1d_fn = convolution.prefill
    causal_conv1d_triton.causal_conv1d_update = convolution.decode
    mamba_state_scatter_triton.track_mamba_states_if_needed = copy_states
    mamba_state_scatter_triton.track_mamba_states_all_layers = copy_states_of_layers
    mamba_state_scatter_triton.scatter_mamba_states_after_mtp_verify = commit
    triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat = delta_rule.split_groups
    triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat_contiguous = delta_rule.split
    fused_gdn_gating.fused_gdn_gating = delta_rule.gates
    chunk.chunk_gated_delta_rule = delta_rule.prefill
    fused_recurrent.fused_recurrent_gated_delta_rule_packed_decode = delta_rule.decode
    fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update = delta_rule.verify
    kda.chunk_kda = kimi_delta.prefill
    fused_recurrent.fused_recurrent_kda_packed_decode = kimi_delta.decode
    fused_norm_gate.FusedRMSNormGated.forward = _gated_norm
    layernorm_gated.RMSNorm.forward = _norm_before_gate
    elementwise.fused_gate_sigmoid_mul_add = delta_rule.add_gated
    elementwise.fused_sigmoid_mul = delta_rule.gate_outputs
    mamba.mamba_chunk_scan_combined = state_space.prefill
    mamba.selective_state_update = state_space.decode
    # Names that are not defined there without a GPU.
    for suffix in ("", "_triton"):
        setattr(mamba, f"causal_conv1d_fn{suffix}", convolution.prefill)
        setattr(mamba, f"causal_conv1d_update{suffix}", convolution.decode)
    # Where the models put their norms. A torch that is built for CUDA asks CUDA, GPU or not, and raises.
    setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))  # noqa: B010
    # SGLang prepares a step's copies for the tree in pinned memory without asking the platform.
    setattr(torch.Tensor, "pin_memory", lambda tensor, *_: tensor)  # noqa: B010


def copy_states(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies the states of the requests in `mamba_track_mask`, [requests], for the tree.

    Args:
        conv_states, ssm_states: [slots, ...].
        cache_indices, mamba_track_indices: slots that are read and written, for each request.
    """
    copy_states_of_layers(
        conv_states[None], ssm_states[None], cache_indices, mamba_track_mask, mamba_track_indices, batch_size
    )


def copy_states_of_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same in all layers at once: the pools are [layers, slots, ...]."""
    # Slots are freed under a step only in a pool that all kinds of layers share, with which nothing is served here.
    assert not check_freed_slots
    tracked = mamba_track_mask[:batch_size].nonzero().flatten()
    source, target = cache_indices[tracked].long(), mamba_track_indices[tracked].long()
    for pool in (conv_states_pool, ssm_states_pool):
        pool[:, target] = pool[:, source]


def commit(
    mamba_caches: MambaPool.SpeculativeState,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Makes the state after the last drafted token that holds that of its request, in all layers.

    Args:
        mamba_caches: states of the slots, and of each request's drafted tokens.
        state_indices_tensor: slot of each request.
        last_correct_step_indices: [requests], the last of its drafted tokens that holds, counted from its first.
        mamba_track_indices: slots that the tree may take, one for each request, negative for none; None where the tree
            takes no states of answers.
        mamba_steps_to_track: the drafted token whose state goes there, negative for none.
        src_indices_raw: row of each request in the drafted tokens' states; None for the first rows.
    """
    pools = [(mamba_caches.temporal, mamba_caches.intermediate_ssm)]
    pools += zip(mamba_caches.conv, mamba_caches.intermediate_conv_window, strict=True)
    rows = torch.arange(len(last_correct_step_indices)) if src_indices_raw is None else src_indices_raw
    wanted = [(state_indices_tensor, last_correct_step_indices)]
    if mamba_track_indices is not None and mamba_steps_to_track is not None:
        wanted.append((mamba_track_indices, mamba_steps_to_track))
    for slots, steps in wanted:
        real = (slots >= 0) & (steps >= 0)
        for pool, drafted in pools:
            if drafted is not None and pool.numel():
                pool[:, slots[real].long()] = drafted[:, rows[real].long(), steps[real].long()].to(pool.dtype)


def _norm_before_gate(self: RMSNorm, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    # As Qwen3.5 has it.
    assert z is not None
    assert self.norm_before_gate
    assert self.group_size is None
    return delta_rule.gated_norm(x, z, self.weight, self.eps, self.activation)


def _gated_norm(self: FusedRMSNormGated, x: torch.Tensor, g: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
    return delta_rule.gated_norm(x, g, self.weight, self.eps, self.activation)
