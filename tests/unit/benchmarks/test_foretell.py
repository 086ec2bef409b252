"""What the benchmarks report about foretelling attention matches what the model attends to."""

from __future__ import annotations

import functools
import importlib

import pytest
import torch

from quality_cases import FOLDER, random_stats, words
from sglang_triattn.transformers_cache.feed import compute_dense


@pytest.fixture(scope="module")
def foretell():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("foretell")


@pytest.fixture
def stream(bench, foretell):
    # One place only: the next would need AHEAD more tokens.
    return bench.tokens.Tokens("random", words(1, 20), words(2, 5 * foretell.AHEAD))


def test_attention_is_the_models_own(foretell, bench, model, stream):
    """Prevents queries, positions or masks other than the model's, and heads that are mixed up."""
    ids = torch.tensor(stream.prompt + stream.private)
    place, prompt = len(stream.prompt) + 4 * foretell.AHEAD, len(stream.prompt)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(ids[None], output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    older = slice(prompt, place - foretell.RECENT)
    expected = torch.stack(
        [layer[0, :, place:, older].double().sum(1).unflatten(0, (2, -1)).sum(1) for layer in weights]
    )
    ((found, total),) = foretell.captured(model, stream, {"": random_stats(model)})
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-6)
    close(total[0], expected.sum(-1))
    values = torch.stack(
        [layer.values[0, :, older].double().norm(dim=-1) for layer in compute_dense(model, ids).layers]
    )
    close(total[1], (expected * values).sum(-1))
    count = round(foretell.KEPT * expected.shape[-1])
    close(found["newest"][0], expected[..., -count:].sum(-1))
    close(found["newest"][1], (expected * values)[..., -count:].sum(-1))
    close(found["best"][0], expected.topk(count).values.sum(-1))
    close(found["random"], total * count / expected.shape[-1])
    assert set(found) == {"score", "value-size", "newest", "random", "best"}
    assert all((value[0] <= found["best"][0] + 1e-6).all() for value in found.values())


def test_what_scores_choose_is_what_a_round_would(foretell, model, stream):
    """Prevents measuring scores from other statistics, or at another place, than named."""
    stats = random_stats(model)
    ((one, _),) = foretell.captured(model, stream, {"a": stats, "b": stats})
    assert torch.equal(one["score a"], one["score b"])
    assert not torch.allclose(one["score a"], one["value-size"])
