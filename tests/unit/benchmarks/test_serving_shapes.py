"""Models of a real model's shape with random weights, and which servers answer the questions of `serving.serve`."""

from contextlib import contextmanager

import pytest

from benchmarks.decode.model import SHAPES
from benchmarks.serving import client, serve, servers
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.stats.file import load_stats


@pytest.mark.parametrize("name", SHAPES)
def test_statistics_fit_the_shape(name):
    """Prevents a shape whose statistics the launch refuses, and prompts of ids that the model does not have."""
    shape = SHAPES[name]
    with servers.shaped_model(name) as (model, path):
        stats = load_stats(path)
        assert stats.fingerprint == model_fingerprint(model)
        assert stats.mean.shape == (shape.layers, shape.q_heads, shape.head_dim // 2)
        assert stats.num_kv_heads == shape.kv_heads
        assert client.vocabulary_of(model) == shape.vocabulary


def test_weights_of_a_shape_alone_are_random(tmp_path, monkeypatch):
    """Prevents a server that looks for weights which a shape does not have, and one that ignores those of a model."""
    started = []

    @contextmanager
    def running_server(model, args, env, log):
        started.append(args)
        yield

    monkeypatch.setattr(servers, "running_server", running_server)
    with servers.shaped_model("Toy") as (shaped, _):
        for model in (shaped, str(tmp_path), "Qwen/Qwen3-8B"):
            with servers.serving(model, [], tmp_path / "log"):
                pass
    assert ["dummy" in args for args in started] == [True, False, False]


def test_pools_of_one_size_take_one_pair_of_servers():
    """Prevents a question that no server is asked, and a pair of large servers that starts twice for nothing."""
    large, small = ["--max-total-tokens", "100"], ["--max-total-tokens", "50", "--enable-metrics"]
    pairs = serve.pairs_of_servers(large, small)
    assert [args for args, _ in pairs] == [large, small]
    ((args, questions),) = serve.pairs_of_servers(large, [*large, "--enable-metrics"])
    assert args == large
    names = {name.partition(",")[0] for _, both in pairs for name in both}
    assert set(questions) == names == set(serve.QUESTIONS)
