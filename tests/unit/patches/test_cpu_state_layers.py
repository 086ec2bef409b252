"""Layers that keep a state, in torch: against the references of transformers, with states carried on."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next import modeling_qwen3_next as published

from sglang_triattn.patches.cpu import convolution, delta_rule, state_layers

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


# Two requests' drafted tokens: each one's first child and next sibling, and the tokens that lead to each.
FOLLOWING = torch.tensor([[1, 3, 4, -1, -1], [1, 2, 3, 4, -1]])
SIBLINGS = torch.tensor([[-1, 2, -1, -1, -1], [-1, -1, -1, -1, -1]])
PATHS = [[[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4]], [list(range(token + 1)) for token in range(5)]]


@pytest.mark.parametrize("tree", [True, False], ids=["trees", "chains"])
def test_drafted_tokens_see_those_that_lead_to_them(tree):
    """Prevents a drafted token from meeting the state after another branch's tokens, and states that change before it
    is known which tokens hold."""
    links = {"retrieve_next_token": FOLLOWING, "retrieve_next_sibling": SIBLINGS} if tree else {}
    paths = PATHS if tree else [PATHS[1]] * 2
    parents = torch.full((2, 5), -7) if tree else None
    weight, bias, x = torch.randn(WIDTH, TAPS), torch.randn(WIDTH), torch.randn(2, 5, WIDTH)
    conv, slots, rows = torch.randn(6, WIDTH, TAPS - 1), torch.tensor([4, 1]), torch.tensor([2, 0])
    # In a chain, neighbouring windows share memory.
    shared = torch.zeros(3, WIDTH, 5 + TAPS - 2)
    windows = torch.zeros(3, 5, WIDTH, TAPS - 1) if tree else shared.as_strided(
        (3, 5, WIDTH, TAPS - 1), (shared.stride(0), 1, shared.stride(1), 1)
    )  # fmt: skip
    mixed = convolution.decode(
        x.transpose(1, 2), conv, weight, bias, "silu", conv_state_indices=slots, intermediate_conv_window=windows,
        intermediate_state_indices=rows, retrieve_parent_token=parents, **links,
    ).transpose(1, 2).reshape(10, WIDTH)  # fmt: skip
    if parents is not None:
        assert parents.tolist() == [[0, 0, 0, 1, 2], [0, 0, 1, 2, 3]]
    a, b = torch.randn(10, VALUE_HEADS), torch.randn(10, VALUE_HEADS)
    log, step = torch.randn(VALUE_HEADS), torch.randn(VALUE_HEADS)
    key_width = KEY_HEADS * KEY_DIM
    q, k, v = mixed[None].split([key_width, key_width, VALUE_HEADS * VALUE_DIM], dim=-1)
    pool = torch.randn(6, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    drafted = torch.zeros(3, 5, VALUE_HEADS, VALUE_DIM, KEY_DIM)
    kept = conv.clone(), pool.clone()
    found = delta_rule.verify(
        log, a, step, 1.0, 20.0, q.unflatten(2, (KEY_HEADS, -1)), k.unflatten(2, (KEY_HEADS, -1)),
        v.unflatten(2, (VALUE_HEADS, -1)), b, pool, slots, cu_seqlens=torch.tensor([0, 5, 10]),
        disable_state_update=True, intermediate_states_buffer=drafted, intermediate_state_indices=rows, cache_steps=5,
        retrieve_parent_token=parents, use_qk_l2norm_in_kernel=True,
    )[0].unflatten(0, (2, 5))  # fmt: skip
    assert torch.equal(conv, kept[0])
    assert torch.equal(pool, kept[1])
    for request, ends in enumerate(paths):
        for token, path in enumerate(ends):
            state, window = pool[slots[request]][None].clone(), conv[slots[request]][None].clone()
            for place in path:
                inputs = convolution.decode(x[request, place, None], window, weight, bias, "silu")
                out, row = torch.empty(1, 1, VALUE_HEADS, VALUE_DIM), [5 * request + place]
                first = torch.zeros(1, dtype=torch.int64)
                delta_rule.decode(inputs, a[row], b[row], log, step, KEY_DIM**-0.5, state, out, first, True)
            torch.testing.assert_close(found[request, token], out[0, 0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(drafted[rows[request], token], state[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(windows[rows[request], token], window[0])


def test_the_state_of_the_last_token_that_holds_is_kept():
    """Prevents a request from going on with the state after another token, or in another request's slot."""
    drafted, windows = torch.randn(2, 3, 5, 4, 3, 2), torch.randn(2, 3, 5, 7, 3)
    temporal, conv = torch.zeros(2, 6, 4, 3, 2), torch.zeros(2, 6, 7, 3)
    caches = SimpleNamespace(
        temporal=temporal, intermediate_ssm=drafted, conv=[conv], intermediate_conv_window=[windows]
    )
    slots, tracked = torch.tensor([4, 1, -1]), torch.tensor([5, -1, 2])
    last, seen = torch.tensor([3, 0, 2]), torch.tensor([1, 2, -1])
    state_layers.commit(caches, slots, last, tracked, seen)
    for pool, states in ((temporal, drafted), (conv, windows)):
        assert torch.equal(pool[:, 4], states[:, 0, 3])
        assert torch.equal(pool[:, 1], states[:, 1, 0])
        assert torch.equal(pool[:, 5], states[:, 0, 1])
        assert not pool[:, [0, 2, 3]].any()


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
