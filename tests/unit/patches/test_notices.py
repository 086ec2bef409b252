"""Each notice for users is logged once, where it applies."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from sglang_triattn.config import Config
from sglang_triattn.patches.observability.notices import active, at_launch, of_stats
from sglang_triattn.rounds.rules import complete
from sglang_triattn.stats.file import QueryStats


def scheduler(
    graphs=(), slots: int = 100_000, most: int = 4096, page_size: int = 1, chunk: int | None = 8192
) -> SimpleNamespace:
    return SimpleNamespace(
        chunked_prefill_size=chunk,
        token_to_kv_pool_allocator=SimpleNamespace(size=slots, page_size=page_size),
        max_running_requests=most,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(decode_cuda_graph_capture_bs=list(graphs))),
    )


CONFIG = complete(Config("s", budget=192, interval=64, recent=64))
"""A request without a prompt holds 256 slots at most."""


def test_what_is_active_is_logged_in_one_sentence():
    """Prevents a log line that shows a record of Python, and not what it means for the server."""
    line = active(scheduler(slots=10_000), CONFIG)
    assert line == (
        "TriAttention is active: a request keeps its prompt and at most 256 tokens of its answer (budget 192, interval "
        "64, newest 64, per-layer-head), so that a pool of 10,000 slots lets about 39 requests run at once, their "
        "prompts not counted"
    )
    assert "about 7 requests" in active(scheduler(slots=10_000, most=7), CONFIG)
    total = dataclasses.replace(CONFIG, budget_scope="total", profile="balanced")
    assert active(scheduler(), total).startswith("TriAttention is active (profile balanced): a request keeps at most")


def spread_stats(mean: float, *, dims: int = 8, unrotated: bool = False) -> QueryStats:
    """Statistics of two layers and eight heads with 8 turned dims of `dims`."""
    others = torch.zeros(2, 8, dims - 8) if unrotated else None
    means = torch.full((2, 8, 4), mean, dtype=torch.complex64), torch.ones(2, 8, 4)
    return QueryStats(*means, 2, dims, None, None, 1, "old.safetensors", unrotated_mean=others)


def test_unscored_dims_are_logged():
    """Prevents a model with half of its dims unscored from looking like any other, and a warning once they are."""
    (line,) = of_stats(CONFIG, spread_stats(0.9, dims=16))
    assert "only 8 of the 16 dims" in line
    assert "old.safetensors holds no means of them; measure the model again" in line
    assert list(of_stats(CONFIG, spread_stats(0.9, dims=16, unrotated=True))) == []
    assert list(of_stats(CONFIG, spread_stats(0.9))) == []
    assert list(of_stats(complete(Config("s", value_share=1.0)), spread_stats(0.9, dims=16))) == []


def test_weights_that_decide_in_part_are_logged():
    """Prevents weights that were calibrated, and then are left out by a setting that nothing mentions."""
    stats = dataclasses.replace(spread_stats(0.9), lookups=torch.ones(2, 4, 12))
    (line,) = of_stats(CONFIG, stats)
    assert line.startswith(
        "The look-up weights of old.safetensors decide 80% of the kept tokens that are not the newest"
    )
    assert line.endswith("start with --triattention-value-share 1")
    assert list(of_stats(complete(Config("s", value_share=1.0)), stats)) == []


@pytest.mark.parametrize(
    ("server", "expected"),
    [
        (scheduler([1, 2, 256], slots=257 * 256), 257),
        (scheduler([1, 2, 256], slots=256 * 256), None),
        (scheduler([1, 2, 256], slots=1 << 20, most=300), 300),
        (scheduler([1, 2, 256], slots=1 << 20, most=256), None),
        (scheduler([], slots=1 << 20), None),
        (scheduler([8], slots=10 * 384, page_size=384), 10),
    ],
)
def test_batches_beyond_the_graphs_are_logged(server, expected):
    """Prevents concurrency that compression makes possible from decoding without graphs unnoticed."""
    lines = list(at_launch(server, CONFIG))
    assert len(lines) == (expected is not None)
    for line in lines:
        assert f"up to {expected} requests" in line
        assert f"--cuda-graph-max-bs-decode {expected}" in line


def test_prompts_that_are_prefilled_whole_are_logged():
    """Prevents answers that end at the pool, although rounds free slots, without a line that says why."""
    (line,) = at_launch(scheduler(slots=10_000, chunk=None), CONFIG)
    assert "pool of 10,000 slots limits prompt and answer together" in line
    assert "--chunked-prefill-size above 0" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("mean", "value_share", "logged"), [(0.59, None, True), (0.61, None, False), (0.59, 1.0, False), (0.1, 0.0, True)]
)
def test_spread_queries_are_logged(mean, value_share, logged):
    """Prevents a model whose queries predict little from looking like any other, and a meaningless warning."""
    lines = list(of_stats(complete(Config("s", value_share=value_share)), spread_stats(mean)))
    assert len(lines) == logged
    for line in lines:
        assert f"poor (mean concentration {mean:.2f}, below 0.6)" in line
        assert "\n" not in line
