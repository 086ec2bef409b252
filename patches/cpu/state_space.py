"""The state-space layers of Mamba-2 (Falcon-H1, Granite-4-H, Nemotron-H) in torch, in the place of SGLang's kernels.

SGLang parts: `mamba_chunk_scan_combined` and `selective_state_update` (sglang/kernels/ops/mamba/triton_ops), called by
`MambaMixer2` (sglang/srt/layers/attention/mamba/mamba.py). Each function takes what the kernel takes.

A request's state is a matrix [values, states] for each head. With the step length dt, the head's rate A, and the
token's input x, B and C: S <- exp(dt A) S + dt x B^T, and the output is S C + D x. All of it is computed in float32,
token by token: slow, and the definition itself.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch.nn import functional

from sglang_triattn.patches.cpu import convolution


def _step(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    rate: torch.Tensor,
    into: torch.Tensor,
    out_of: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token of each request: state [..., H, V, N], x [..., H, V], dt [..., H], rate and skip [H], into and out_of
    [..., H, N]."""
    state = state * (dt * rate).exp()[..., None, None] + (dt[..., None] * x)[..., None] * into[..., None, :]
    return state, (state @ out_of[..., None])[..., 0] + skip[:, None] * x


def prefill(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    initial_states: torch.Tensor | None = None,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: object,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Writes the outputs for the concatenated tokens of several requests to `out`.

    Args:
        x, out: [1, tokens, heads, V]. dt: [1, tokens, heads]. A, D, dt_bias: [heads].
        B, C: [1, tokens, groups, N]; heads of a group share them.
        cu_seqlens: first token of each request, and the end.
        initial_states: [requests, heads, V, N]; zero where there are none.
        track_seq_idx, track_end_locs: requests, and for each the end of the tokens that its third result saw.

    Returns:
        The states before each `chunk_size`-th token of all, [1, chunks, heads, V, N]; the last state of each request;
        the states at `track_end_locs`, [1, tracked, heads, V, N].
    """
    assert z is None
    assert dt_softplus
    heads = x.shape[2]
    inputs = x[0].float()
    lengths = functional.softplus(dt[0].float() + dt_bias.float()).clamp(*dt_limit)
    into, out_of = (part[0].float().repeat_interleave(heads // part.shape[2], dim=1) for part in (B, C))
    rate, skip = A.float(), D.float()
    wanted = [] if track_end_locs is None else track_end_locs.tolist()
    before, last, tracked = [], [], {}
    bounds = cu_seqlens.tolist()
    for request, (first, end) in enumerate(pairwise(bounds)):
        shape = (heads, x.shape[3], B.shape[3])
        state = torch.zeros(shape) if initial_states is None else initial_states[request].float()
        for token in range(first, end):
            if token % chunk_size == 0:
                before.append(state)
            state, out[0, token] = _step(state, inputs[token], lengths[token], rate, into[token], out_of[token], skip)
            if token + 1 in wanted:
                tracked[token + 1] = state
        last.append(state)
    found = torch.stack([tracked[end] for end in wanted])[None].to(state_dtype) if wanted else None
    return torch.stack(before)[None].to(state_dtype), torch.stack(last).to(state_dtype), found


def decode(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    z: torch.Tensor | None = None,
    dt_softplus: bool = True,
    pad_slot_id: int = -1,
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **unused: object,
) -> None:
    """Writes the output of one token of each request to `out`, and its state to `state`.

    Args:
        state: [slots, heads, V, N].
        x, out: [requests, heads, V]. B, C: [requests, groups, N].
        dt, A, D, dt_bias: as for `prefill`, repeated along V, and along N.
        state_batch_indices: slot of each request; a negative one is padding, whose output is zero.
        disable_state_update: whether these are drafted tokens, of which it is not known yet which will hold: no state
            changes, and x, out, dt, B and C are [requests, n, ...].
        intermediate_states_buffer: [rows, n, heads, V, N], takes the state after each drafted token.
        intermediate_state_indices: the row of each request there.
        retrieve_parent_token: [requests, n], the token that each follows, of a tree; None where it is the one before.
    """
    assert all(value is None or value is False for value in unused.values())
    assert z is None
    assert dt_softplus
    assert pad_slot_id < 0
    heads = x.shape[-2]
    real = state_batch_indices >= 0
    slots = state_batch_indices.long().clamp(min=0)
    into, out_of = (part.float().repeat_interleave(heads // part.shape[-2], dim=-2) for part in (B, C))
    lengths = functional.softplus(dt[..., 0].float() + dt_bias[..., 0].float())
    rate, skip, before = A[:, 0, 0].float(), D[:, 0].float(), state[slots].float()
    if not disable_state_update:
        after, found = _step(before, x.float(), lengths, rate, into, out_of, skip)
        state[slots[real]] = after[real].to(state.dtype)
        out.copy_((found * real[:, None, None]).to(out.dtype))
        return
    assert intermediate_states_buffer is not None
    assert intermediate_state_indices is not None
    rows, states = intermediate_state_indices[: len(x)].long(), []
    for token in range(x.shape[1]):
        if token:
            before = convolution.state_before(states, retrieve_parent_token, token)
        inputs = x[:, token].float(), lengths[:, token], rate, into[:, token], out_of[:, token], skip
        before, out[:, token] = _step(before, *inputs)
        states.append(before)
        intermediate_states_buffer[rows, token] = before.to(intermediate_states_buffer.dtype)
