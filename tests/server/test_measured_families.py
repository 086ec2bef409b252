"""What calibration measures inside SGLang on models whose attention differs from a Llama's, against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import harness
from families import WINDOW, build_family
from family_servers import SEE_ONE_MORE, modules_of, remote_code
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.stats.file import load_stats
from warm import run_command
from words import text, with_tokenizer

WINDOWED, ALL = (1, 3), (0, 1, 2, 3)
# The scored layers, and those of them that have RoPE.
CASES = {
    "gemma2": (WINDOWED, WINDOWED),
    "gemma3": (WINDOWED, WINDOWED),
    "olmo3": (WINDOWED, WINDOWED),
    "gpt-oss": (WINDOWED, WINDOWED),
    "mimo-v2": ((0, 5), (0, 5)),
    "exaone4": (WINDOWED, ()),
    "cohere2": (WINDOWED, ()),
    "smollm3": (ALL, (0, 1, 2)),
    "seed-oss": (ALL, ALL),
    "dots1": (ALL, ALL),
}


def widen(folder: Path) -> None:
    """Lets a model see the one token more in transformers that it sees in SGLang."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "sliding_window": WINDOW + 1}))


@pytest.mark.parametrize("family", CASES)
def test_calibration_in_sglang_agrees_with_transformers(forkserver, tmp_path, family):
    """Prevents measuring other layers than those that are scored, or turning back queries that were never turned."""
    model = with_tokenizer(build_family(tmp_path, family), tmp_path / "model")
    data, out = tmp_path / "text.txt", tmp_path / "measured.safetensors"
    data.write_text(text(0, 900))
    words = ["calibrate", "--engine", "sglang", "--model", model.path, "--data", data, "--out", out, "--device", "cpu"]
    words += ["--window", "300", "--", "--max-total-tokens", harness.POOL]
    words += remote_code(family)
    env = {
        "SGLANG_DISABLED_MODEL_ARCHS": harness.unused_architectures(*modules_of(family)),
        "TORCHDYNAMO_DISABLE": "1",
        "HF_MODULES_CACHE": str(tmp_path / "modules"),
    }
    ended = run_command(forkserver, tmp_path, words, {**harness.STRICT, **env})
    assert ended.code == 0, ended.output[-3000:]

    measured = load_stats(out)
    if family in SEE_ONE_MORE:
        widen(model.path)
    expected = calibrate(str(model.path), str(data), window=300, device="cpu", progress=False)
    layers, turning = CASES[family]
    for stats in (measured, expected):
        assert stats.layers == layers
        assert tuple(layer for layer, rotates in zip(layers, stats.rotates, strict=True) if rotates) == turning
    for name in ("mean", "abs_mean", "unrotated_mean"):
        one, other = getattr(measured, name), getattr(expected, name)
        assert (one - other).norm() <= 1e-3 * other.norm(), name
