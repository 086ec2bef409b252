"""Kimi's delta attention (Kimi-Linear) in torch, in the place of SGLang's Triton kernels.

SGLang parts: `chunk_kda` (sglang/kernels/ops/attention/fla/kda.py), `fused_recurrent_kda_packed_decode`
(fla/fused_recurrent.py). Each function takes what the kernel takes.

It is the gated delta rule (`delta_rule`) with a decay of its own for each dim of a key.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_triattn.patches.cpu import delta_rule


def gates(A_log: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None) -> torch.Tensor:
    """Logarithms of the decays, [..., value heads, K] in float32, of inputs `a` of this shape."""
    rate = A_log.float().reshape(-1, 1).exp()
    steps = a.float() + dt_bias.float().reshape(a.shape[-2:])
    if lower_bound is not None:
        return lower_bound * (rate * steps).sigmoid()
    return -rate * functional.softplus(steps)


def prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None = None,
    beta_is_raw: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    output_intermediate_states: bool = False,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Outputs for the concatenated tokens of several requests.

    Args:
        q, k, g: [1, tokens, heads, K]. v: [1, tokens, heads, V]. beta: [1, tokens, heads].
        initial_state: [slots, heads, V, K], which takes the last states. Those of new requests are zero.
        initial_state_indices: slot of each request; a negative one is padding.
        cu_seqlens: first token of each request, and the end.
        track_state, track_chunk_idx: [requests, heads, V, K], which takes each request's state before this chunk of its
            tokens.

    Returns:
        Outputs like `v`; on demand also the states before each chunk of a request's tokens, [1, chunks, heads, V, K].
    """
    queries, keys = q[0].float(), k[0].float()
    if use_qk_l2norm_in_kernel:
        queries, keys = delta_rule.unit(queries), delta_rule.unit(keys)
    decays = gates(A_log, g[0], dt_bias, lower_bound)
    strengths = beta[0].float().sigmoid() if beta_is_raw else beta[0].float()
    parts = queries * q.shape[-1] ** -0.5, keys, v[0].float(), decays, strengths
    found, states = delta_rule.run(parts, initial_state, initial_state_indices, cu_seqlens)
    if track_state is not None and track_chunk_idx is not None:
        for row, (own, chunk) in enumerate(zip(states, track_chunk_idx.tolist(), strict=False)):
            if 0 <= chunk < len(own):
                track_state[row] = own[chunk]
    outputs = found.to(v.dtype)[None]
    return (outputs, delta_rule.joined(states)) if output_intermediate_states else outputs


def decode(
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request: queries, keys and values side by side in `mixed_qkv`, [requests, width].

    Writes `out`, [requests, 1, heads, V], and the states of the requests whose slot is not negative.
    """
    decays = gates(A_log, a.reshape(len(mixed_qkv), initial_state.shape[1], -1), dt_bias, lower_bound)
    return delta_rule.decode_gated(
        *(mixed_qkv, decays, b.float().sigmoid(), scale),
        *(initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel),
    )
