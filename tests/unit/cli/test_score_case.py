"""`sglang-triattn score-case` on the published cases, and on cases that cannot be scored."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from checkout import ROOT
from kernel_cases import GOLDEN_SCORES
from sample_stats import HEAD_DIM, HEADS, KV_HEADS, PARTIAL, partial_stats
from sglang_triattn.cli.main import main
from sglang_triattn.cli.scored_keys import score_case
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.stats.file import save_stats

GOLDEN = ROOT / "tests" / "golden"
STATS = str(GOLDEN / "qwen3_8b.pt")
INPUTS = ("layers", "num_q_heads", "num_kv_heads", "keys_cached", "positions", "next_position", "inv_freq", "keep")
# The reference's phases are float32; a mean over the offsets damps the frequencies that suffer, a maximum does not.
TOLERANCES = {field: tolerance for _, field, tolerance in GOLDEN_SCORES}


def case_of(name: str, folder: Path, **changes) -> str:
    """A case without its answers, `changes` applied; None leaves a field out."""
    with np.load(GOLDEN / f"{name}.npz") as golden:
        fields = {key: golden[key] for key in INPUTS} | changes
    path = folder / "case.npz"
    np.savez(path, **{key: value for key, value in fields.items() if value is not None})
    return str(path)


@pytest.mark.parametrize("name", ["qwen3_8b_a", "qwen3_8b_b"])
def test_published_cases(name, tmp_path, capsys):
    """Prevents drift from the published method anywhere between the file and the kept sets."""
    out = tmp_path / "out.npz"
    case = case_of(name, tmp_path)
    assert main(["score-case", case, "--stats", STATS, "--out", str(out), "--device", "cpu"]) == 0
    assert "wrote" in capsys.readouterr().out
    golden, ours = np.load(GOLDEN / f"{name}.npz"), np.load(out)
    assert set(ours.files) == {*TOLERANCES, "kept_union", "kept_per_head", "kept_per_layer_head"}
    for field, tolerance in TOLERANCES.items():
        assert ours[field].dtype == np.float32
        np.testing.assert_allclose(ours[field], golden[field], rtol=0, atol=tolerance)
    keep = int(golden["keep"])
    for field in ("kept_union", "kept_per_head", "kept_per_layer_head"):
        assert ours[field].shape == golden[field].shape
        for mine, theirs in zip(ours[field].reshape(-1, keep), golden[field].reshape(-1, keep), strict=True):
            assert (np.diff(mine) > 0).all()
            assert len(set(theirs) - set(mine)) <= -(-keep // 64)


def test_the_scorer_that_serves_answers(tmp_path, monkeypatch):
    """Prevents checking the published method on other code than the code that serves."""
    keep, pieces = Scorer.keep, Scorer.pieces
    monkeypatch.setattr(Scorer, "keep", lambda self, *row: keep(self, *row) - 1)

    def shifted(*row, **options):
        return (replace(piece, scores=piece.scores + 1) for piece in pieces(*row, **options))

    monkeypatch.setattr(Scorer, "pieces", shifted)
    case = case_of("qwen3_8b_a", tmp_path)
    changed = score_case(case, STATS, device="cpu")
    monkeypatch.undo()
    plain = score_case(case, STATS, device="cpu")
    for name, values in plain.items():
        np.testing.assert_allclose(changed[name], values + (-1 if name.startswith("kept") else 1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_key_dtypes(dtype, tmp_path):
    """Prevents --dtype from being ignored or from breaking the scores."""
    out = tmp_path / "out.npz"
    case = case_of("qwen3_8b_a", tmp_path)
    assert main(["score-case", case, "--stats", STATS, "--out", str(out), "--device", "cpu", "--dtype", dtype]) == 0
    golden, ours = np.load(GOLDEN / "qwen3_8b_a.npz"), np.load(out)
    error = np.abs(ours["score_mean"] - golden["score_mean"]).mean() / golden["score_mean"].std()
    # The case's keys are float16 already; fewer bits must show, but by no more than their number explains.
    low, high = {"float16": (0, 1e-3), "bfloat16": (1e-5, 1e-2), "float8_e4m3fn": (1e-3, 0.1),
                 "float8_e5m2": (1e-3, 0.2)}[dtype]  # fmt: skip
    assert low <= error < high


def test_layers_by_number_and_the_whole_head(tmp_path):
    """Prevents a layer from being scored with the means of another, and a file's dims or layers without RoPE from being
    scored as if they were turned."""
    stats = partial_stats()
    save_stats(stats, tmp_path / "s.safetensors")
    layers, count = np.array([5, 2]), 30
    keys = np.random.default_rng(0).standard_normal((2, KV_HEADS, count, HEAD_DIM)).astype(np.float32)
    case = {"layers": layers, "num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "keys_cached": keys, "keep": 9}
    np.savez(tmp_path / "case.npz", **case, next_position=100, inv_freq=stats.rope.inv_freq.numpy())
    found = score_case(tmp_path / "case.npz", tmp_path / "s.safetensors", device="cpu")
    by_head = keys.repeat(HEADS // KV_HEADS, axis=1)
    # Layer 2 has no RoPE: the mean logit over the whole head.
    parts = (stats.mean[1].real, stats.mean[1].imag, stats.unrotated_mean[1])
    expected = np.einsum("hnd,hd->hn", by_head[1], torch.cat(parts, dim=-1).numpy())
    np.testing.assert_allclose(found["score_mean"][1], expected, rtol=0, atol=1e-4)
    # Layer 5 has it: what follows the rotated dims adds the same to the mean and to the maximum.
    save_stats(replace(stats, unrotated_mean=0 * stats.unrotated_mean), tmp_path / "without.safetensors")
    without = score_case(tmp_path / "case.npz", tmp_path / "without.safetensors", device="cpu")
    added = np.einsum("hnd,hd->hn", by_head[0][..., 2 * PARTIAL :], stats.unrotated_mean[2].numpy())
    for name in ("score_mean", "score_max"):
        np.testing.assert_allclose(found[name][0] - without[name][0], added, rtol=0, atol=1e-4)
    np.testing.assert_array_equal(found["score_norm_only"], without["score_norm_only"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": None}, "lacks keep"),
        ({"keep": np.array(10**6)}, "keep is 1000000"),
        ({"keep": np.array(1.5)}, "whole number"),
        ({"layers": np.array([0, 99, 1, 2])}, "within the 5"),
        ({"layers": np.array([0])}, "layers"),
        ({"num_q_heads": np.array(16)}, "query heads"),
        ({"num_kv_heads": np.array(7)}, "KV heads"),
        ({"inv_freq": np.ones(3)}, "inv_freq"),
        ({"positions": np.arange(3)}, "positions"),
        ({"keys_cached": np.zeros((2, 2))}, "keys_cached"),
    ],
    ids=str,
)
def test_cases_that_do_not_fit_are_refused(changes, message, tmp_path, capsys):
    """Prevents a traceback, or scores for something else than requested, for a case with a wrong field."""
    out = tmp_path / "out.npz"
    case = case_of("qwen3_8b_a", tmp_path, **changes)
    assert main(["score-case", case, "--stats", STATS, "--out", str(out), "--device", "cpu"]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not out.exists()


def test_unusable_files_are_refused(tmp_path, capsys):
    """Prevents a traceback for a file that is missing, truncated, pickled or cannot be written."""
    good = case_of("qwen3_8b_a", tmp_path)
    cut, pickled = tmp_path / "cut.npz", tmp_path / "pickled.npz"
    cut.write_bytes(Path(good).read_bytes()[:1000])
    np.savez(pickled, layers=np.array([{}], dtype=object))
    out = str(tmp_path / "out.npz")
    for case, target in (
        (str(tmp_path / "none.npz"), out),
        (str(cut), out),
        (str(pickled), out),
        (good, str(tmp_path / "out.txt")),
        (good, str(tmp_path / "no" / "out.npz")),
    ):
        assert main(["score-case", case, "--stats", STATS, "--out", target, "--device", "cpu"]) == 2
        assert capsys.readouterr().err.count("\n") == 1
