"""What the benchmarks report about predicting attention matches what the model attends to."""

from __future__ import annotations

import functools

import pytest
import torch

from benchmarks.quality import predict_attention
from benchmarks.quality.tokens import Tokens
from quality_cases import random_stats, words
from sglang_triattn.transformers_cache.feed import compute_dense


@pytest.fixture
def stream():
    # One place only: the next would need AHEAD more tokens.
    return Tokens("random", words(1, 20), words(2, 5 * predict_attention.AHEAD))


def test_attention_is_the_models_own(model, stream):
    """Prevents queries, positions or masks other than the model's, and heads that are mixed up."""
    ids = torch.tensor(stream.prompt + stream.private)
    place, prompt = len(stream.prompt) + 4 * predict_attention.AHEAD, len(stream.prompt)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(ids[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    older = slice(prompt, place - predict_attention.RECENT)
    expected = torch.stack(
        [layer[0, :, place:, older].double().sum(1).unflatten(0, (2, -1)).sum(1) for layer in weights]
    )
    ((found, total),) = predict_attention.captured(model, stream, {"": random_stats(model)})
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(total[0], expected.sum(-1))
    values = torch.stack(
        [layer.values[0, :, older].double().norm(dim=-1) for layer in compute_dense(model, ids).layers]
    )
    close(total[1], (expected * values).sum(-1))
    count = round(predict_attention.KEPT * expected.shape[-1])
    close(found["newest"][0], expected[..., -count:].sum(-1))
    close(found["newest"][1], (expected * values)[..., -count:].sum(-1))
    close(found["best"][0], expected.topk(count).values.sum(-1))
    close(found["random"], total * count / expected.shape[-1])
    assert set(found) == {"score", "value-size", "newest", "random", "best"}
    assert all((value[0] <= found["best"][0] + 1e-6).all() for value in found.values())


def test_what_scores_choose_is_what_a_round_would(model, stream):
    """Prevents measuring scores from other statistics, or at another place, than named."""
    stats = random_stats(model)
    ((one, _),) = predict_attention.captured(model, stream, {"a": stats, "b": stats})
    assert torch.equal(one["score a"], one["score b"])
    assert not torch.allclose(one["score a"], one["value-size"])
