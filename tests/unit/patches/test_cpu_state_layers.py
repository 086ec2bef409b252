"""Layers that keep a state, in torch: against the references of transformers, with states carried on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as published

from sglang_triattn.patches.cpu import convolution, delta_rule

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 16, 24, 4
WIDTH = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
LENGTHS = (70, 1, 33)
SLOTS = torch.tensor([4, 1, 2])


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def rule_inputs(tokens: int) -> tuple[torch.Tensor, ...]:
    """Queries, keys, values, logarithms of decays and write strengths of one request."""
    q, k = (torch.randn(1, tokens, KEY_HEADS, KEY_DIM) for _ in range(2))
    v = torch.randn(1, tokens, VALUE_HEADS, VALUE_DIM)
    return q, k, v, -torch.rand(1, tokens, VALUE_HEADS), torch.rand(1, tokens, VALUE_HEADS)


def expected_outputs(inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    q, k, *rest = inputs
    q, k = (part.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for part in (q, k))
    return published.torch_chunk_gated_delta_rule(
        q, k, *rest, initial_state=None, output_final_state=True, use_qk_l2norm_in_kernel=True
    )


def bounds_of(lengths: tuple[int, ...]) -> torch.Tensor:
    return functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))


def test_delta_rule_of_a_batch_by_chunks_equals_transformers():
    """Prevents states of one request in another's slot, lost states between chunks, and a wrong rule."""
    requests = [rule_inputs(tokens) for tokens in LENGTHS]
    pool = torch.zeros(6, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    # The first request's last 6 tokens are a second chunk.
    first = [tuple(part[:, :64] for part in requests[0]), *requests[1:]]
    q, k, v, g, beta = (torch.cat(parts, dim=1) for parts in zip(*first, strict=True))
    where = {"initial_state": pool, "use_qk_l2norm_in_kernel": True}
    lengths = (64, *LENGTHS[1:])
    found, _, states = delta_rule.prefill(
        q, k, v, g, beta, initial_state_indices=SLOTS, cu_seqlens=bounds_of(lengths), **where
    )
    assert states.shape == (1, 3, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    rest = tuple(part[:, 64:] for part in requests[0])
    more, _, _ = delta_rule.prefill(*rest, initial_state_indices=SLOTS[:1], cu_seqlens=bounds_of((6,)), **where)
    answers = list(found.split(lengths, dim=1))
    answers[0] = torch.cat((answers[0], more), dim=1)
    for inputs, answer, slot in zip(requests, answers, SLOTS, strict=True):
        expected, state = expected_outputs(inputs)
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(pool[slot].transpose(-1, -2), state[0], atol=1e-5, rtol=1e-4)
    assert not pool[[0, 3, 5]].any()


def test_decode_continues_a_prefill_and_leaves_padding_alone():
    """Prevents another order of heads in decode than in prefill, and states written for padding."""
    mixed, a, b = torch.randn(9, WIDTH), torch.randn(9, VALUE_HEADS), torch.randn(9, VALUE_HEADS)
    log, bias = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    key_width = KEY_HEADS * KEY_DIM
    q, k, v = mixed.split([key_width, key_width, VALUE_HEADS * VALUE_DIM], dim=-1)
    g, beta = delta_rule.gates(log, a, b, bias)
    whole, pool = (torch.zeros(3, VALUE_HEADS, VALUE_DIM, KEY_DIM) for _ in range(2))
    expected, _, _ = delta_rule.prefill(
        q.view(1, 9, KEY_HEADS, KEY_DIM),
        k.view(1, 9, KEY_HEADS, KEY_DIM),
        v.view(1, 9, VALUE_HEADS, VALUE_DIM),
        g,
        beta,
        initial_state=whole,
        initial_state_indices=torch.tensor([1]),
        cu_seqlens=torch.tensor([0, 9]),
        use_qk_l2norm_in_kernel=True,
    )
    for token in range(9):
        out = torch.empty(2, 1, VALUE_HEADS, VALUE_DIM)
        row = [token, token]
        slots = torch.tensor([1, -1])
        delta_rule.decode(mixed[row], a[row], b[row], log, bias, KEY_DIM**-0.5, pool, out, slots, True)
        torch.testing.assert_close(out[0, 0], expected[0, token], atol=1e-5, rtol=1e-4)
        assert not out[1].any()
    torch.testing.assert_close(pool, whole, atol=1e-5, rtol=1e-4)


def test_convolution_by_chunks_and_tokens_equals_the_whole():
    """Prevents inputs of another request under the taps, and states that lose or repeat an input."""
    weight, bias = torch.randn(WIDTH, TAPS), torch.randn(WIDTH)
    texts = [torch.randn(WIDTH, tokens) for tokens in LENGTHS]
    # What an earlier request has left must not be read.
    pool = torch.randn(6, WIDTH, TAPS - 1)
    others = pool[[0, 3, 5]].clone()
    new, lengths = torch.zeros(3, dtype=torch.bool), list(LENGTHS)
    found = convolution.prefill(
        torch.cat(texts, dim=1), weight, bias, pool, bounds_of(LENGTHS), lengths, SLOTS, new
    ).split(LENGTHS, dim=1)
    more = torch.randn(WIDTH, 2)
    going_on = torch.ones(1, dtype=torch.bool)
    chunk = convolution.prefill(more, weight, bias, pool, bounds_of((2,)), [2], SLOTS[1:2], going_on)
    last = torch.randn(3, WIDTH)
    decoded = convolution.decode(last, pool, weight, bias, "silu", conv_state_indices=torch.tensor([4, -1, 1]))
    assert not decoded[1].any()
    texts[0] = torch.cat((texts[0], last[0, :, None]), dim=1)
    texts[1] = torch.cat((texts[1], more, last[2, :, None]), dim=1)
    answers = [
        torch.cat((found[0], decoded[0, :, None]), dim=1),
        torch.cat((found[1], chunk, decoded[2, :, None]), dim=1),
        found[2],
    ]
    for text, answer in zip(texts, answers, strict=True):
        padded = functional.pad(text, (TAPS - 1, 0))[None]
        expected = functional.silu(functional.conv1d(padded, weight[:, None], bias, groups=WIDTH))[0]
        torch.testing.assert_close(answer, expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(pool[[0, 3, 5]], others)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation):
    """Prevents a gate before the norm, or another activation."""
    x, gate, weight = torch.randn(5, 8), torch.randn(5, 8), torch.randn(8)
    turned = functional.silu(gate) if activation == "silu" else gate.sigmoid()
    expected = functional.rms_norm(x, (8,), weight, 1e-6) * turned
    torch.testing.assert_close(delta_rule.gated_norm(x, gate, weight, 1e-6, activation), expected)


def test_packed_projections_are_split_by_key_head():
    """Prevents values, gates and strengths of one head with the keys of another."""
    group = VALUE_HEADS // KEY_HEADS
    parts = [torch.randn(3, KEY_HEADS, n) for n in (KEY_DIM, KEY_DIM, group * VALUE_DIM, group * VALUE_DIM)]
    b, a = torch.randn(3, KEY_HEADS, group), torch.randn(3, KEY_HEADS, group)
    packed = torch.cat(parts, dim=-1).flatten(1)
    mixed, z, found_b, found_a = delta_rule.split_groups(
        packed, torch.cat((b, a), dim=-1).flatten(1), KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM
    )
    assert torch.equal(mixed, torch.cat([part.flatten(1) for part in parts[:3]], dim=1))
    assert torch.equal(z, parts[3].view(3, VALUE_HEADS, VALUE_DIM))
    assert torch.equal(found_b, b.flatten(1))
    assert torch.equal(found_a, a.flatten(1))
