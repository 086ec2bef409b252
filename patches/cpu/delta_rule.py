"""The gated delta rule (Qwen3-Next, Qwen3.5) in torch, in the place of SGLang's Triton kernels.

SGLang parts: `chunk_gated_delta_rule` (sglang/kernels/ops/attention/fla/chunk.py),
`fused_recurrent_gated_delta_rule_packed_decode` (fla/fused_recurrent.py), `fused_sigmoid_gating_delta_rule_update`
(linear/fused_sigmoid_gating_recurrent.py), `fused_gdn_gating` (linear/fused_gdn_gating.py),
`fused_qkvzba_split_reshape_cat` (triton_gdn_fused_proj.py), `FusedRMSNormGated` (fla/fused_norm_gate.py). Each function
takes what the kernel takes.

A request's state is a matrix [values, keys] for each value head. With the decay exp(g), the write strength beta and
the token's query, key and value, S <- exp(g) S, S <- S + beta (v - S k) k^T, and the output is S q. All of it is
computed in float32, token by token: slow, and the definition itself.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from sglang_triattn.patches.cpu import convolution

CHUNK = 64
"""Tokens between two of the states that `prefill` returns, as in SGLang's kernel."""


def split_groups(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Projections that are packed by key head, unpacked.

    Args:
        mixed_qkvz: [tokens, key_heads * (2 * key_dim + 2 * group * value_dim)], group = value_heads / key_heads.
        mixed_ba: [tokens, key_heads * 2 * group].

    Returns:
        Queries, keys and values side by side; gates [tokens, value_heads, value_dim]; b and a [tokens, value_heads].
    """
    tokens, group = len(mixed_qkvz), value_heads // key_heads
    widths = [key_dim, key_dim, group * value_dim, group * value_dim]
    parts = mixed_qkvz.view(tokens, key_heads, sum(widths)).split(widths, dim=-1)
    q, k, v, z = (part.reshape(tokens, -1) for part in parts)
    b, a = (part.reshape(tokens, -1) for part in mixed_ba.view(tokens, key_heads, 2 * group).split(group, dim=-1))
    return torch.cat((q, k, v), dim=-1), z.view(tokens, value_heads, value_dim), b, a


def split(
    mixed_qkvz: torch.Tensor, mixed_ba: torch.Tensor, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `split_groups`, of projections that lie side by side: all queries, then all keys, values, and gates."""
    values = value_heads * value_dim
    rest, z = mixed_qkvz.split([2 * key_heads * key_dim + values, values], dim=-1)
    b, a = mixed_ba.split([value_heads, value_heads], dim=-1)
    return rest.contiguous(), z.reshape(len(z), value_heads, value_dim), b.contiguous(), a.contiguous()


def gates(
    A_log: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    dt_bias: torch.Tensor,
    beta: float = 1.0,
    threshold: float = 20.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logarithms of the decays, and write strengths: each [1, tokens, value heads], in float32."""
    steps = functional.softplus(a.float() + dt_bias.float(), beta, threshold)
    return (-A_log.float().exp() * steps)[None], b.float().sigmoid()[None]


def unit(x: torch.Tensor) -> torch.Tensor:
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _step(
    state: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request: state [..., V, K], q and k [..., K], v [..., V], g [..., 1 or K], and beta [...]."""
    state = state * g.exp()[..., None, :]
    change = (v - (state @ k[..., None])[..., 0]) * beta[..., None]
    state = state + change[..., None] * k[..., None, :]
    return state, (state @ q[..., None])[..., 0]


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
    scale: float | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Outputs for the concatenated tokens of several requests.

    Args:
        q, k: [1, tokens, key heads, K]. v: [1, tokens, value heads, V]. g, beta: [1, tokens, value heads].
        initial_state: [slots, value heads, V, K], which takes the last states. Those of new requests are zero.
        initial_state_indices: slot of each request; a negative one is padding.
        cu_seqlens: first token of each request, and the end.

    Returns:
        Outputs like `v`; None; the states before each chunk of a request's tokens, [1, chunks, value heads, V, K].
    """
    assert not head_first
    group = v.shape[2] // q.shape[2]
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    queries, keys = (part[0].float().repeat_interleave(group, dim=1) for part in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = unit(queries), unit(keys)
    parts = queries * factor, keys, v[0].float(), g[0].float()[..., None], beta[0].float()
    found, states = run(parts, initial_state, initial_state_indices, cu_seqlens, inplace_update)
    return found.to(v.dtype)[None], None, joined(states)


def run(
    parts: tuple[torch.Tensor, ...],
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    cu_seqlens: torch.Tensor,
    inplace_update: bool = True,
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """Runs requests one after another, token by token.

    Args:
        parts: queries, keys, values, g and beta of `_step`, of all tokens.
        initial_state, initial_state_indices, cu_seqlens: as for `prefill`.
        inplace_update: whether the slots take the last states.

    Returns:
        Outputs like the values; the states before each chunk of each request's tokens.
    """
    found, states = torch.zeros_like(parts[2]), []
    bounds = cu_seqlens.tolist()
    for slot, first, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        # A copy: the slot takes the last state before the first one is returned.
        state = initial_state[max(slot, 0)].to(torch.float32, copy=True)
        if slot < 0:
            state.zero_()
        states.append([])
        for token in range(first, end):
            if (token - first) % CHUNK == 0:
                states[-1].append(state)
            state, found[token] = _step(state, *(part[token] for part in parts))
        if inplace_update and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return found, states


def joined(states: list[list[torch.Tensor]]) -> torch.Tensor:
    """[1, chunks, value heads, V, K]: the states that `run` returns, as SGLang's kernels return them."""
    return torch.stack([state for own in states for state in own])[None]


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
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request: queries, keys and values side by side in `mixed_qkv`, [requests, width].

    Writes `out`, [requests, 1, value heads, V], and the states of the requests whose slot is not negative.
    """
    g, beta = gates(A_log, a, b, dt_bias)
    return decode_gated(
        mixed_qkv, g[0][..., None], beta[0], scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel
    )


def decode_gated(
    mixed_qkv: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float,
    initial_state: torch.Tensor,
    out: torch.Tensor,
    ssm_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `decode`, with g [requests, value heads, 1 or K] and beta [requests, value heads] of `_step`."""
    requests = len(mixed_qkv)
    value_heads, value_dim, key_dim = initial_state.shape[1:]
    value_width = value_heads * value_dim
    key_width = (mixed_qkv.shape[1] - value_width) // 2
    q, k, v = mixed_qkv.float().split([key_width, key_width, value_width], dim=-1)
    group = value_heads * key_dim // key_width
    q, k = (part.view(requests, -1, key_dim).repeat_interleave(group, dim=1) for part in (q, k))
    if use_qk_l2norm_in_kernel:
        q, k = unit(q), unit(k)
    slots = ssm_state_indices[:requests].long()
    real = slots >= 0
    before = initial_state[slots.clamp(min=0)].float()
    state, found = _step(before, q * scale, k, v.view(requests, value_heads, value_dim), g, beta)
    initial_state[slots[real]] = state[real].to(initial_state.dtype)
    out[:, 0] = (found * real[:, None, None]).to(out.dtype)
    return out, initial_state


def verify(
    A_log: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor,
    disable_state_update: bool,
    intermediate_states_buffer: torch.Tensor,
    intermediate_state_indices: torch.Tensor,
    cache_steps: int,
    retrieve_parent_token: torch.Tensor | None = None,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    is_kda: bool = False,
) -> torch.Tensor:
    """Outputs for drafted tokens, of which it is not known yet which will hold: no state changes.

    Args:
        q, k: [1, requests * n, key heads, K]. v: [1, requests * n, value heads, V]. a, b: [requests * n, value heads].
        initial_state_source, initial_state_indices: as for `prefill`.
        cu_seqlens: first token of each request, and the end.
        intermediate_states_buffer: [rows, n, value heads, V, K], takes the state after each token.
        intermediate_state_indices: the row of each request there.
        cache_steps: n, drafted tokens of each request.
        retrieve_parent_token: [requests, n], the token that each follows, of a tree; None where it is the one before.

    Returns:
        Outputs like `v`.
    """
    assert disable_state_update
    assert not is_kda
    requests, group = len(cu_seqlens) - 1, v.shape[2] // q.shape[2]
    queries, keys = (part[0].float().repeat_interleave(group, dim=1) for part in (q, k))
    if use_qk_l2norm_in_kernel:
        queries, keys = unit(queries), unit(keys)
    queries = queries * (q.shape[-1] ** -0.5 if scale is None else scale)
    g, beta = gates(A_log, a, b, dt_bias, softplus_beta, softplus_threshold)
    parts = (queries, keys, v[0].float(), g[0][..., None], beta[0])
    parts = [part.unflatten(0, (requests, cache_steps)) for part in parts]
    rows = intermediate_state_indices[:requests].long()
    state = initial_state_source[initial_state_indices[:requests].long().clamp(min=0)].float()
    found, after = torch.zeros_like(parts[2]), []
    for token in range(cache_steps):
        if token:
            state = convolution.state_before(after, retrieve_parent_token, token)
        state, found[:, token] = _step(state, *(part[:, token] for part in parts))
        after.append(state)
        intermediate_states_buffer[rows, token] = state.to(intermediate_states_buffer.dtype)
    return found.flatten(0, 1).to(v.dtype)[None]


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float, activation: str
) -> torch.Tensor:
    """RMS norm of `x`, [..., width], times an activation of `gate`, in the dtype of `x`."""
    found = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        found = found * weight.float()
    turned = gate.float().sigmoid()
    return (found * (turned if activation == "sigmoid" else turned * gate.float())).to(x.dtype)


def add_gated(hidden: torch.Tensor, gate: torch.Tensor, shared: torch.Tensor, routed: torch.Tensor) -> None:
    """Adds sigmoid(hidden . gate) * shared to `routed`, in place: [tokens, width] each, and `gate` [width]."""
    strength = (hidden.float() @ gate.float()).sigmoid()
    routed.add_((strength[:, None] * shared.float()).to(routed.dtype))


def gate_outputs(
    attn_output: torch.Tensor, gate: torch.Tensor, inplace: bool = False, quant: bool = False
) -> torch.Tensor:
    """Outputs of attention, [tokens, width], times the sigmoids of `gate`, [tokens, width] or [tokens, heads, D]."""
    assert not quant
    found = (attn_output.float() * gate.float().sigmoid().reshape(attn_output.shape)).to(attn_output.dtype)
    return attn_output.copy_(found) if inplace else found
