"""What calibration measures inside SGLang on models whose attention differs from a Llama's, against transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import harness
from families import WINDOW, build_family
from family_servers import SEE_ONE_MORE, modules_of, remote_code
from gemma4_family import build_gemma4
from latent_family import LATENT_FAMILIES
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.stats.file import load_stats
from sglang_triattn.stats.query_stats import QueryStats
from step_family import build_step
from tiny_model import TinyModel
from warm import run_command
from words import text, with_tokenizer, word_tokenizer

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
    "qwen3-next": ((3,), (3,)),
    "qwen3.5": (WINDOWED, WINDOWED),
    "lfm2": (WINDOWED, WINDOWED),
    "falcon-h1": (ALL, ALL),
    "granite-4-h": (WINDOWED, ()),
    "nemotron-h": ((1, 4), ()),
}


def widen(folder: Path) -> None:
    """Lets a model see the one token more in transformers that it sees in SGLang."""
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "sliding_window": WINDOW + 1}))


def measured_in_sglang(
    forkserver, tmp_path: Path, family: str, model: TinyModel, more: dict[str, str] | None = None
) -> QueryStats:
    """What `sglang-triattn calibrate --engine sglang` measures on `tmp_path / "text.txt"`, which this writes."""
    data, out = tmp_path / "text.txt", tmp_path / "measured.safetensors"
    data.write_text(text(0, 900))
    words = ["calibrate", "--engine", "sglang", "--model", model.path, "--data", data, "--out", out, "--device", "cpu"]
    words += ["--window", "300", "--", "--max-total-tokens", harness.POOL]
    words += remote_code(family)
    env = {
        **harness.only_models(*modules_of(family)),
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        **(more or {}),
    }
    ended = run_command(forkserver, tmp_path, words, {**harness.STRICT, **env})
    assert ended.code == 0, ended.output[-3000:]
    return load_stats(out)


@pytest.mark.parametrize("family", CASES)
def test_calibration_in_sglang_agrees_with_transformers(forkserver, tmp_path, family):
    """Prevents measuring other layers than those that are scored, or turning back queries that were never turned."""
    model = with_tokenizer(build_family(tmp_path, family), tmp_path / "model")
    measured = measured_in_sglang(forkserver, tmp_path, family, model)
    if family in SEE_ONE_MORE:
        widen(model.path)
    data = tmp_path / "text.txt"
    expected = calibrate(str(model.path), str(data), window=300, device="cpu", progress=False)
    layers, turning = CASES[family]
    for stats in (measured, expected):
        assert stats.layers == layers
        assert tuple(layer for layer, rotates in zip(layers, stats.rotates, strict=True) if rotates) == turning
    for name in ("mean", "abs_mean", "unrotated_mean"):
        one, other = getattr(measured, name), getattr(expected, name)
        assert (one - other).norm() <= 1e-3 * other.norm(), name


# Lets every pass absorb queries, where a prefill would expand keys.
_ABSORBING = """
def absorb(self, forward_batch):
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import AttnForwardMethod
    return AttnForwardMethod.MLA

def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    attention = "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA"
    HookRegistry.register(f"{attention}.dispatch_attn_forward_method", absorb, HookType.REPLACE)
"""


@pytest.mark.parametrize(("family", "absorbs"), [("deepseek-v3", False), ("glm-4.7-flash", True)])
def test_calibration_of_latent_kv(forkserver, tmp_path, family, absorbs):
    """Prevents other statistics from queries that meet latents than from those that meet expanded keys, and pairs of
    dims in the order that transformers puts them in."""
    assert family in LATENT_FAMILIES
    model = with_tokenizer(build_family(tmp_path, family), tmp_path / "model")
    more = {}
    if absorbs:
        harness.install_plugin(tmp_path / "plugin", "absorbing", _ABSORBING)
        more = {"PYTHONPATH": harness.python_path(tmp_path / "plugin")}
    measured = measured_in_sglang(forkserver, tmp_path, family, model, more)
    expected = calibrate(str(model.path), str(tmp_path / "text.txt"), window=300, device="cpu", progress=False)
    for stats in (measured, expected):
        assert (stats.layers, stats.rotates, stats.token_count) == (ALL, (True,) * 4, 900)
        assert (stats.num_kv_heads, stats.head_dim, stats.rotary_start) == (1, 56, 40)
        assert (stats.rope.style, stats.rope.rotary_dim) == ("interleaved", 16)
    torch.testing.assert_close(measured.rope.inv_freq, expected.rope.inv_freq, rtol=1e-5, atol=0)
    for name in ("mean", "abs_mean", "unrotated_mean"):
        one, other = getattr(measured, name), getattr(expected, name)
        assert (one - other).norm() <= 1e-3 * other.norm(), name
    assert (measured.unrotated_mean - expected.unrotated_mean.roll(1, dims=1)).norm() > expected.unrotated_mean.norm()


def normed_queries(account: torch.nn.Module, layers: Sequence[int]) -> torch.Tensor:
    """[layers, tokens, H_q, D] float64: the queries before their rotation, on the text that was measured."""
    ids = word_tokenizer()(text(0, 900))["input_ids"]
    seen: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for layer in layers:
        norm = account.model.layers[layer].self_attn.q_norm
        norm.register_forward_hook(lambda module, given, query, layer=layer: seen[layer].append(query[0].double()))
    with torch.no_grad():
        for start in range(0, 900, 300):
            account(input_ids=torch.tensor([ids[start : start + 300]]))
    return torch.stack([torch.cat(parts) for parts in seen.values()])


@pytest.mark.parametrize(("family", "readers"), [("gemma-4", (3,)), ("gemma-4-shared", (3, 4, 6))])
def test_calibration_of_gemma4(forkserver, tmp_path, family, readers):
    """Prevents queries turned back from other positions than SGLang's, which start at 1 here; and, where layers read
    the KV of another, statistics of that one alone."""
    model = build_gemma4(tmp_path, family)
    measured = measured_in_sglang(forkserver, tmp_path, family, model)
    expected = calibrate(str(model.path), str(tmp_path / "text.txt"), window=300, device="cpu", progress=False)
    queries = torch.complex(*normed_queries(model.load(), (1, *readers)).chunk(2, dim=-1))
    means, sizes = queries.mean(1), queries.abs().mean(1)
    for stats in (measured, expected):
        assert (stats.layers, stats.rotates, stats.token_count) == ((1, 3), (True, True), 900)
        assert (stats.num_kv_heads, stats.head_dim, stats.rope.rotary_dim) == (2, 64, 64)
        assert stats.rope.inv_freq.count_nonzero() == 8
        for found, each in ((stats.mean, means), (stats.abs_mean, sizes)):
            own = torch.stack([each[0], each[1:].mean(0)])
            assert (found - own).norm() < 1e-3 * own.norm()


def test_calibration_in_sglang_agrees_with_queries_before_their_rotation(forkserver, tmp_path):
    """Prevents wrong queries of Step-3.5, which calibration with transformers cannot load: taken before their norm,
    turned back by the frequencies of window layers, or of those layers' other heads."""
    model = with_tokenizer(build_step(tmp_path), tmp_path / "model")
    measured = measured_in_sglang(forkserver, tmp_path, "step-3.5", model)
    layers, account = (1, 3), model.load()
    # SGLang lets a query see one token more.
    account.model.config.sliding_window = WINDOW + 1
    queries = normed_queries(account, layers)
    turning = torch.complex(queries[..., :8], queries[..., 8:16])
    assert (measured.layers, measured.rotates, measured.token_count) == (layers, (True, True), 900)
    pairs = (
        (measured.mean, turning.mean(1)),
        (measured.abs_mean, turning.abs().mean(1)),
        (measured.unrotated_mean, queries[..., 16:].mean(1)),
    )
    for one, other in pairs:
        assert (one - other).norm() < 1e-3 * other.norm()
