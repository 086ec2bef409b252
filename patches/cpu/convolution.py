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
    pad_slot_id: int = -1,
    **unused: object,
) -> torch.Tensor:
    """Convolves one token of each request: x and the result are [requests, width].

    `conv_state`, [slots, width, taps - 1], takes the tokens of the requests whose slot is not negative.
    """
    # Those belong to drafted tokens, with which such models are not served here.
    assert cache_seqlens is None
    assert pad_slot_id < 0
    assert all(value is None for value in unused.values())
    assert x.ndim == 2
    slots = torch.arange(len(x)) if conv_state_indices is None else conv_state_indices[: len(x)].long()
    real = slots >= 0
    inputs = torch.cat((conv_state[slots.clamp(min=0)].to(x.dtype), x[..., None]), dim=-1)[..., -weight.shape[-1] :]
    conv_state[slots[real]] = inputs[real][..., 1:].to(conv_state.dtype)
    kind = ("silu" if activation else None) if isinstance(activation, bool) else activation
    return _convolve(inputs, weight, bias, kind)[..., 0] * real[:, None]


def _convolve(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, activation: str | None
) -> torch.Tensor:
    """[requests, width, tokens] of [requests, width, taps - 1 + tokens]."""
    found = functional.conv1d(
        inputs.float(), weight.float()[:, None], None if bias is None else bias.float(), groups=len(weight)
    )
    return (functional.silu(found) if activation in ("silu", "swish") else found).to(inputs.dtype)
