"""Short causal convolutions in torch, with the last inputs of each request in a state.

SGLang part: `causal_conv1d_fn` and `causal_conv1d_update` (sglang/kernels/ops/mamba/causal_conv1d_triton.py). Each
function takes what the kernel takes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional


def prefill(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    **_: object,
) -> torch.Tensor:
    """Convolves the concatenated tokens of several requests.

    Args:
        x: [width, tokens].
        weight: [width, taps]. bias: [width].
        conv_states: [slots, width, taps - 1], which takes each request's last inputs.
        query_start_loc: first token of each request, and the end.
        cache_indices: slot of each request; a negative one is padding. None for the first slots.
        has_initial_state: whether a request goes on from its state, for each.

    Returns:
        [width, tokens].
    """
    found = torch.zeros_like(x)
    bounds = query_start_loc.tolist()
    slots = list(range(len(bounds) - 1)) if cache_indices is None else cache_indices.tolist()
    continued = [False] * len(slots) if has_initial_state is None else has_initial_state.tolist()
    taps = weight.shape[-1]
    for slot, is_continued, first, end in zip(slots, continued, bounds, bounds[1:], strict=False):
        if slot < 0 or first == end:
            continue
        state = conv_states[slot]
        before = state[:, -(taps - 1) :] if is_continued else torch.zeros_like(state[:, -(taps - 1) :])
        inputs = torch.cat((before.to(x.dtype), x[:, first:end]), dim=-1)
        found[:, first:end] = _convolve(inputs[None], weight, bias, activation)[0]
        state[:, -(taps - 1) :] = inputs[:, -(taps - 1) :].to(state.dtype)
    return found


def decode(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: bool | str | None = None,
    cache_seqlens: torch.Tensor | None = None,
    conv_state_indices: torch.Tensor | None = None,
    num_accept_tokens: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_next_token: torch.Tensor | None = None,
    retrieve_next_sibling: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    pad_slot_id: int = -1,
) -> torch.Tensor:
    """Convolves one token of each request: x and the result are [requests, width].

    `conv_state`, [slots, width, taps - 1], takes the tokens of the requests whose slot is not negative. With
    `intermediate_conv_window`, it convolves drafted tokens instead, see `verify`.
    """
    assert cache_seqlens is None
    assert num_accept_tokens is None
    assert pad_slot_id < 0
    kind = ("silu" if activation else None) if isinstance(activation, bool) else activation
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices[: len(x)].long()
    if intermediate_conv_window is not None:
        assert intermediate_state_indices is not None
        parents = None
        if retrieve_next_token is not None and retrieve_next_sibling is not None:
            parents = parents_of(retrieve_next_token, retrieve_next_sibling)
            assert retrieve_parent_token is not None
            retrieve_parent_token.copy_(parents)
        before = conv_state[slots.clamp(min=0)]
        return verify(x, before, weight, bias, kind, intermediate_conv_window, intermediate_state_indices, parents)
    assert x.ndim == 2
    real = slots >= 0
    inputs = torch.cat((conv_state[slots.clamp(min=0)].to(x.dtype), x[..., None]), dim=-1)[..., -weight.shape[-1] :]
    conv_state[slots[real]] = inputs[real][..., 1:].to(conv_state.dtype)
    return _convolve(inputs, weight, bias, kind)[..., 0] * real[:, None]


def verify(
    x: torch.Tensor,
    before: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    windows: torch.Tensor,
    rows: torch.Tensor,
    parents: torch.Tensor | None,
) -> torch.Tensor:
    """Convolves drafted tokens, of which it is not known yet which will hold: no state changes.

    Args:
        x: [requests, width, n], drafted tokens of each request, the first of which holds already.
        before: [requests, width, taps - 1], the states before them.
        windows: [rows, n, width, taps - 1], takes the state after each; those of neighbouring tokens may share memory
            where each token follows the one before it.
        rows: the row of each request there.
        parents: [requests, n], the token that each follows, of a tree; None where it is the one before.

    Returns:
        [requests, width, n], a view of [requests, n, width].
    """
    rows = rows[: len(x)].long()
    state = before[..., -(weight.shape[-1] - 1) :].to(x.dtype)
    found, after = x.new_empty(len(x), x.shape[2], x.shape[1]), []
    for token in range(x.shape[2]):
        if token:
            state = state_before(after, parents, token)
        inputs = torch.cat((state, x[..., token, None]), dim=-1)
        found[:, token] = _convolve(inputs, weight, bias, activation)[..., 0]
        after.append(inputs[..., 1:])
        windows.select(1, token)[rows] = after[-1].to(windows.dtype)
    return found.transpose(1, 2)


def state_before(after: Sequence[torch.Tensor], parents: torch.Tensor | None, token: int) -> torch.Tensor:
    """[requests, ...]: the state that a drafted token meets, which is not its request's first.

    Args:
        after: [requests, ...] each, the states after the tokens so far.
        parents: [requests or more, n], the token that each follows, of a tree; None where it is the one before.
    """
    if parents is None:
        return after[-1]
    request = torch.arange(len(after[-1]))
    return torch.stack(tuple(after))[parents[: len(request), token].long(), request]


def parents_of(following: torch.Tensor, siblings: torch.Tensor) -> torch.Tensor:
    """[requests, n] int64: the token of a tree that each drafted token follows; 0 for a root or one outside the tree.

    Args:
        following, siblings: [requests, n], first child and next sibling of each, -1 for none; both come later.
    """
    parents, request = torch.zeros_like(following, dtype=torch.int64), torch.arange(len(following))
    for token in range(following.shape[1]):
        for linked, parent in ((following[:, token], token), (siblings[:, token], parents[:, token])):
            has = linked >= 0
            parent = torch.as_tensor(parent).expand(len(has))
            parents[request[has], linked[has].long()] = parent[has]
    return parents


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """[requests, width, tokens] of [requests, width, taps - 1 + tokens]."""
    found = functional.conv1d(
        inputs.float(), weight.float()[:, None], None if bias is None else bias.float(), groups=len(weight)
    )
    return (functional.silu(found) if activation in ("silu", "swish") else found).to(inputs.dtype)
