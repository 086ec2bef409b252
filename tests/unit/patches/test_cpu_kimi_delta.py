"""Kimi's delta attention on CPUs, against transformers."""

from __future__ import annotations

import torch
from torch.nn import functional
from transformers.models.kimi_linear import modeling_kimi_linear as published

from sglang_triattn.patches.cpu import kimi_delta

HEADS, KEY_DIM, VALUE_DIM = 3, 8, 10
LENGTHS, SLOTS = (70, 5), (4, 1)


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    """What comes before gates and norms: [1, tokens, heads, width]."""
    q, k, g = (torch.randn(1, tokens, HEADS, KEY_DIM) for _ in range(3))
    return {
        "q": q,
        "k": k,
        "v": torch.randn(1, tokens, HEADS, VALUE_DIM),
        "g": g,
        "beta": torch.randn(1, tokens, HEADS),
    }


def expected(
    given: dict[str, torch.Tensor], log: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, v, g, beta = given.values()
    decays = -log.exp()[:, None] * functional.softplus(g + bias.view(HEADS, KEY_DIM))
    outputs, state = published.recurrent_kimi_delta_attention(
        q, k, v, decays, beta.sigmoid(), None, True, use_qk_l2norm_in_kernel=True
    )
    return outputs[0], state[0].transpose(-1, -2)


def test_prefill_and_decode_equal_transformers():
    """Prevents states of one request in another's slot, one decay for all dims of a key, and a state of another chunk
    for the tree."""
    torch.manual_seed(0)
    log, bias = torch.randn(HEADS), torch.randn(HEADS * KEY_DIM)
    requests = [inputs(tokens) for tokens in LENGTHS]
    pool, tracked = torch.zeros(6, HEADS, VALUE_DIM, KEY_DIM), torch.zeros(2, HEADS, VALUE_DIM, KEY_DIM)
    # The last token of each is decoded.
    first = {name: torch.cat([each[name][:, :-1] for each in requests], dim=1) for name in requests[0]}
    found, states = kimi_delta.prefill(
        **first,
        initial_state=pool,
        initial_state_indices=torch.tensor(SLOTS),
        cu_seqlens=torch.tensor([0, 69, 73]),
        A_log=log,
        dt_bias=bias,
        beta_is_raw=True,
        use_qk_l2norm_in_kernel=True,
        output_intermediate_states=True,
        track_state=tracked,
        track_chunk_idx=torch.tensor([1, -1]),
    )
    assert states.shape == (1, 3, HEADS, VALUE_DIM, KEY_DIM)
    torch.testing.assert_close(tracked, torch.stack([states[0, 1], torch.zeros_like(states[0, 1])]))
    last = {name: torch.cat([each[name][:, -1] for each in requests]) for name in requests[0]}
    mixed = torch.cat([last[name].flatten(1) for name in ("q", "k", "v")], dim=1)
    out = torch.empty(2, 1, HEADS, VALUE_DIM)
    slots = torch.tensor(SLOTS)
    kimi_delta.decode(mixed, last["g"].flatten(1), last["beta"], log, bias, KEY_DIM**-0.5, pool, out, slots, True)
    for place, (given, answer) in enumerate(zip(requests, found[0].split([69, 4]), strict=True)):
        outputs, state = expected(given, log, bias)
        torch.testing.assert_close(torch.cat([answer, out[place]]), outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[SLOTS[place]], state, atol=1e-5, rtol=1e-4)
    assert not pool[[0, 2, 3, 5]].any()


def test_bounded_gates():
    """Prevents decays without the bound that Ling was trained with."""
    log, a = torch.randn(HEADS), torch.randn(4, HEADS, KEY_DIM)
    found = kimi_delta.gates(log, a, torch.zeros(HEADS * KEY_DIM), -5.0)
    torch.testing.assert_close(found, -5.0 * (log.exp()[:, None] * a).sigmoid())
