"""State-space layers in torch: against the reference of transformers, with states carried on."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.falcon_h1 import modeling_falcon_h1 as published

from sglang_triattn.patches.cpu import state_space

HEADS, GROUPS, VALUES, STATES, CHUNK = 6, 2, 5, 7, 16
LENGTHS = (70, 1, 33)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    return {"A": -torch.rand(HEADS) - 0.1, "D": torch.randn(HEADS), "dt_bias": torch.randn(HEADS)}


def inputs(tokens: int) -> dict[str, torch.Tensor]:
    """Inputs, step lengths before their softplus, and what writes to and reads a state, of one request."""
    return {
        "x": torch.randn(1, tokens, HEADS, VALUES),
        "dt": torch.randn(1, tokens, HEADS),
        "B": torch.randn(1, tokens, GROUPS, STATES),
        "C": torch.randn(1, tokens, GROUPS, STATES),
    }


def expected(request: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs, and the last state, by another way of computing: by chunks, all tokens of one at once."""
    settings = {"chunk_size": CHUNK, "dt_softplus": True, "return_final_states": True}
    x, dt, into, out_of = (request[name] for name in ("x", "dt", "B", "C"))
    return published.mamba2_chunk_scan(x, dt, weights["A"], into, out_of, D=weights["D"],
                                       dt_bias=weights["dt_bias"], **settings)  # fmt: skip


def run(requests: list[dict[str, torch.Tensor]], weights, **more) -> tuple[torch.Tensor, ...]:
    joined = {name: torch.cat([request[name] for request in requests], dim=1) for name in requests[0]}
    lengths = [request["x"].shape[1] for request in requests]
    bounds = functional.pad(torch.tensor(lengths).cumsum(0), (1, 0))
    out = torch.full_like(joined["x"], float("nan"))
    states = state_space.prefill(
        **joined, **weights, chunk_size=CHUNK, cu_seqlens=bounds, out=out, state_dtype=torch.float32, **more
    )
    return out, *states


def test_a_batch_by_chunks_equals_transformers(weights):
    """Prevents states of one request in another's, lost states between chunks, and a wrong rule."""
    requests = [inputs(tokens) for tokens in LENGTHS]
    parts = [{name: part[:, :40] for name, part in requests[0].items()}, *requests[1:]]
    rest = {name: part[:, 40:] for name, part in requests[0].items()}
    found, _, last, _ = run(parts, weights)
    more, _, end, _ = run([rest], weights, initial_states=last[:1])
    answers = list(found.split((40, *LENGTHS[1:]), dim=1))
    answers[0] = torch.cat((answers[0], more), dim=1)
    for request, answer, state in zip(requests, answers, (end[0], *last[1:]), strict=True):
        outputs, final = expected(request, weights)
        torch.testing.assert_close(answer, outputs, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(state, final[0], atol=1e-5, rtol=1e-4)


def test_states_between_tokens(weights):
    """Prevents the tree from keeping the state of another token, or of another request."""
    requests = [inputs(tokens) for tokens in (37, 40)]
    which, ends = torch.tensor([1, 0]), torch.tensor([37 + 21, 19])
    _, before, _, tracked = run(requests, weights, track_seq_idx=which, track_end_locs=ends)
    assert before.shape == (1, -(-77 // CHUNK), HEADS, VALUES, STATES)
    for chunk in (1, 2):
        seen = {name: part[:, : chunk * CHUNK] for name, part in requests[0].items()}
        torch.testing.assert_close(before[0, chunk], expected(seen, weights)[1][0], atol=1e-5, rtol=1e-4)
    _, inside = expected({name: part[:, : 48 - 37] for name, part in requests[1].items()}, weights)
    torch.testing.assert_close(before[0, 3], inside[0], atol=1e-5, rtol=1e-4)
    for place, (request, seen) in enumerate(((1, 21), (0, 19))):
        _, state = expected({name: part[:, :seen] for name, part in requests[request].items()}, weights)
        torch.testing.assert_close(tracked[0, place], state[0], atol=1e-5, rtol=1e-4)


def test_decode_continues_a_prefill_and_leaves_padding_alone(weights):
    """Prevents another order of heads in decode than in prefill, and states written for padding."""
    request = inputs(9)
    outputs, final = expected(request, weights)
    pool = torch.zeros(3, HEADS, VALUES, STATES)
    others = pool[[0, 1]].clone()
    slots = torch.tensor([2, -1])
    for token in range(9):
        x, dt, into, out_of = (request[name][0, token] for name in ("x", "dt", "B", "C"))
        out = torch.full((2, HEADS, VALUES), float("nan"))
        wide = (HEADS, VALUES)
        state_space.decode(
            pool,
            torch.stack([x, torch.randn_like(x)]),
            torch.stack([dt, dt])[..., None].expand(2, *wide),
            weights["A"][:, None, None].expand(*wide, STATES),
            torch.stack([into, into]),
            torch.stack([out_of, out_of]),
            weights["D"][:, None].expand(wide),
            dt_bias=weights["dt_bias"][:, None].expand(wide),
            state_batch_indices=slots,
            out=out,
        )
        torch.testing.assert_close(out[0], outputs[0, token], atol=1e-5, rtol=1e-4)
        assert not out[1].any()
    torch.testing.assert_close(pool[2], final[0], atol=1e-5, rtol=1e-4)
    assert torch.equal(pool[[0, 1]], others)


@pytest.mark.parametrize("parents", [[[0, 0, 0, 1, 2], [0, 0, 1, 2, 3]], None], ids=["trees", "chains"])
def test_drafted_tokens_see_those_that_lead_to_them(weights, parents):
    """Prevents a drafted token from meeting the state after another branch's tokens, and states that change before it
    is known which tokens hold."""
    given = inputs(10)
    x, dt, into, out_of = (given[name][0].unflatten(0, (2, 5)) for name in ("x", "dt", "B", "C"))
    pool, drafted = torch.randn(4, HEADS, VALUES, STATES), torch.zeros(3, 5, HEADS, VALUES, STATES)
    slots, rows, before, wide = torch.tensor([3, 1]), torch.tensor([0, 2]), pool.clone(), (HEADS, VALUES)
    shared = weights["A"][:, None, None].expand(*wide, STATES), weights["D"][:, None].expand(wide)
    bias = weights["dt_bias"][:, None].expand(wide)
    out = torch.empty_like(x)
    state_space.decode(
        pool, x, dt[..., None].expand_as(x), shared[0], into, out_of, shared[1], dt_bias=bias,
        state_batch_indices=slots, out=out, disable_state_update=True, intermediate_states_buffer=drafted,
        intermediate_state_indices=rows, cache_steps=5,
        retrieve_parent_token=None if parents is None else torch.tensor(parents),
    )  # fmt: skip
    assert torch.equal(pool, before)
    for request in range(2):
        for token in range(5):
            path = [token]
            while path[0]:
                path.insert(0, path[0] - 1 if parents is None else parents[request][path[0]])
            state, found = pool[slots[request]][None].clone(), torch.empty(1, *wide)
            for place in path:
                at = request, place
                state_space.decode(
                    state, x[at][None], dt[at][None, :, None].expand(1, *wide), shared[0], into[at][None],
                    out_of[at][None], shared[1], dt_bias=bias, state_batch_indices=torch.tensor([0]), out=found,
                )  # fmt: skip
            torch.testing.assert_close(out[at], found[0], atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(drafted[rows[request], token], state[0], atol=1e-5, rtol=1e-4)
