"""What benchmarks say about how well attention is foretold is what the model attends to."""

from __future__ import annotations

import functools
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch

from quality_cases import FOLDER, random_stats, words
from sglang_triattn.stats.file import save_stats
from sglang_triattn.transformers_cache.feed import compute_dense


@pytest.fixture(scope="module")
def foretell():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        return importlib.import_module("foretell")


@pytest.fixture
def stream(bench, foretell):
    # One place: the next would need AHEAD tokens more.
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
    """Prevents a capture of scores by other statistics, or in another place, than named."""
    stats = random_stats(model)
    ((one, _),) = foretell.captured(model, stream, {"a": stats, "b": stats})
    assert torch.equal(one["score a"], one["score b"])
    assert not torch.allclose(one["score a"], one["value-size"])


@pytest.mark.parametrize("script", ["foretell.py", "calibration_texts.py"])
def test_a_quick_run(folder, model, tmp_path, script):
    """Prevents a benchmark that does not run as users run it."""
    save_stats(random_stats(model), tmp_path / "stats.safetensors")
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / script), "--quick", "--model", str(folder), "--json", str(out)]
    command += ["--stats", str(tmp_path / "stats.safetensors")] if script == "foretell.py" else []
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    captures = [row[kind] for row in rows if "criterion" in row for kind in ("attention", "output")]
    captures += [value for row in rows if "stream" in row for name, value in row.items() if name != "stream"]
    assert captures
    assert all(0 < capture < 1 for capture in captures)
