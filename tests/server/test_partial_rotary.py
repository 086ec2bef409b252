"""A GLM-4.5-like model, whose RoPE turns half of each head: measured in SGLang, and scored over the whole head."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import harness
from families import FAMILIES, build_family
from forked_servers import run_command
from harness import KEYS_ALONE, compression, prompt, served_logprobs
from oracle import TOLERANCE, Oracle, oracle_of
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.stats.file import load_stats
from tiny_model import TinyModel
from word_tokenizer import text, with_tokenizer

ENV = harness.only_models(FAMILIES["glm-4.5"].module)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A text of numbered words."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text(text(0, 3000))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory, forkserver, data) -> TinyModel:
    """The model with statistics that `sglang-triattn calibrate --engine sglang` measured on that text."""
    folder = tmp_path_factory.mktemp("partial")
    found = with_tokenizer(build_family(folder, "glm-4.5"), folder / "model")
    found = dataclasses.replace(found, stats=folder / "measured.safetensors")
    words = ["calibrate", "--engine", "sglang", "--model", found.path, "--data", data, "--out", found.stats]
    words += ["--device", "cpu", "--window", "512", "--", "--max-total-tokens", harness.POOL]
    ended = run_command(forkserver, folder, words, {**harness.STRICT, **ENV})
    assert ended.code == 0, ended.output[-3000:]
    return found


def test_calibration_in_sglang_agrees_with_transformers(model, data):
    """Prevents dims that are not turned from being lost, turned back, or taken before the query norm."""
    measured = load_stats(model.stats)
    expected = calibrate(str(model.path), str(data), window=512, device="cpu", progress=False)
    assert measured.unrotated_mean.shape == (4, 4, 16)
    assert (measured.layers, measured.rotates) == (expected.layers, expected.rotates) == ((0, 1, 2, 3), (True,) * 4)
    for name in ("mean", "abs_mean", "unrotated_mean"):
        one, other = getattr(measured, name), getattr(expected, name)
        assert (one - other).norm() < 1e-3 * other.norm(), name
        # The heads differ, or nothing was compared.
        assert (one - other.roll(1, dims=1)).norm() > (0.02 if name == "abs_mean" else 0.1) * other.norm(), name


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 16])
def test_logits_of_requests_compacted_together(serve, model, page_size):
    """Prevents half of each head from counting for nothing, or another half, in scores of a batch with one prefix."""
    stem = prompt(8, 40)
    prompts = [stem + prompt(20 + i, length) for i, length in enumerate((3, 17, 24))]
    # Scores alone: the model repeats words, and between their equal values the last bits would choose.
    flags = ("--page-size", str(page_size), *KEYS_ALONE)
    client = serve(*flags, env=ENV, model=model)
    client.generate(stem, 1)
    answers = client.generate_all(prompts, 250, logprobs=True)
    assert "of the 32 dims" not in client.server.log_path.read_text()
    serve.stop(client)
    right = Oracle(**{**vars(oracle_of(model)), "value_share": 0.0})
    without = Oracle(**{**vars(right), "unrotated": None})
    missed = []
    for ids, response in zip(prompts, answers, strict=True):
        assert response["meta_info"]["cached_tokens"] >= len(stem) - len(stem) % page_size
        frozen, everything = len(ids) - len(ids) % page_size, ids + response["output_ids"][:-1]
        expected, rounds = right.logprobs(everything, len(ids), frozen)
        assert compression(response)["rounds"] == rounds >= 5
        values, tokens = served_logprobs(response)
        assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
        half, _ = without.logprobs(everything, len(ids), frozen)
        missed.append((half.gather(1, tokens) - values).abs().max())
    # The same comparison must fail for a server that scores half of each head.
    assert torch.stack(missed).min() > 50 * TOLERANCE
