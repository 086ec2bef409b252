"""SGLang's attention backends, in the precision that they serve with, against an account in float32."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from harness import BUDGET, ON_GPU, compression, prompt, served_logprobs
from oracle import Oracle, oracle_of
from storm import FLAGS, RETRACTING, assert_withstood, storm
from tiny_model import build_tiny_model

# FlashAttention-3 comes with sglang-kernel, and runs on Hopper.
PARTS = {"fa3": "sgl_kernel", "flashinfer": "flashinfer", "triton": "triton"}
BACKENDS = [
    pytest.param(
        backend,
        marks=pytest.mark.skipif(not (ON_GPU and importlib.util.find_spec(part)), reason=f"needs a GPU and {part}"),
    )
    for backend, part in PARTS.items()
]


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory):
    """The tiny model with the smallest heads that every backend computes."""
    return build_tiny_model(tmp_path_factory.mktemp("models"), head_dim=64)


def error(account: Oracle, ids: list[int], response: dict) -> torch.Tensor:
    """The mean difference of the served log-probabilities from those of an account."""
    expected, rounds = account.logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
    assert rounds in (0, compression(response)["rounds"])
    values, tokens = served_logprobs(response)
    return (expected.gather(1, tokens) - values).abs().mean()


@pytest.mark.parametrize("backend", ["default", *BACKENDS])
def test_logits_in_bfloat16(serve, wide_heads, backend):
    """Prevents an attention backend that reads evicted K/V, leaves kept K/V out, or replays a graph of longer rows."""
    account = oracle_of(wide_heads)
    account.model.to(torch.bfloat16).to(torch.float32)
    dense = Oracle(**{**vars(account), "budget": 10_000})
    chosen = () if backend == "default" else ("--attention-backend", backend)
    client = serve("--dtype", "bfloat16", *chosen, model=wide_heads)
    ids = prompt(5, 50)
    plain = client.generate(ids, 240, logprobs=True, custom_params={"triattention": {"enabled": False}})
    noise = error(dense, ids, plain)
    client.flush()
    compressed = client.generate(ids, 240, logprobs=True)
    assert compression(compressed)["rounds"] >= 5
    # Rounding changes which of two tokens stays where their scores are close.
    assert error(account, ids, compressed) < 3 * noise
    assert error(dense, ids, compressed) > 10 * noise


@pytest.mark.parametrize("backend", BACKENDS)
def test_storm(serve, wide_heads, backend):
    """Prevents slots that are lost, or freed while a kernel still reads them, with an attention backend."""
    flags = ("--dtype", "bfloat16", "--attention-backend", backend, "--max-total-tokens", "1500", *FLAGS)
    client = serve(*flags, model=wide_heads, env=RETRACTING)
    _, finished = storm(client, seed=3, requests=60, budgets=(8, BUDGET), longest=500)
    assert_withstood(client, finished, 60)
