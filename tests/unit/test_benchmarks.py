"""The benchmarks of the scorer run, check what they time, and the traffic stays within its bound."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


def run(script: str, out: Path, *options: str) -> dict:
    # Not -P: a benchmark imports what stands beside it.
    command = [sys.executable, str(FOLDER / script), "--quick", "--json", str(out), *options]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert set(content) == {"command", "date", "quick", "machine", "versions", "rows"}
    assert all(str(row["shape"]) in done.stdout for row in content["rows"])
    return content


def test_traffic_is_near_the_minimum(tmp_path):
    """Prevents a launch that reads keys, slots or columns more often than it must."""
    rows = run("score_traffic.py", tmp_path / "traffic.json")["rows"]
    shapes = {row["shape"] for row in rows}
    for model in ("Qwen3-8B", "Llama-3-8B", "SmolLM2-135M"):
        for tokens in (2176, 16384):
            assert f"{model} 8x{tokens} bf16" in shapes
    assert {row["selection"] for row in rows} == {"scores only", "union", "shared-mean", "per-head"}
    assert all(1 < row["ratio_to_minimum"] <= 1.10 for row in rows)


def test_speed_is_measured_on_equal_answers(tmp_path):
    """Prevents a speed-up over a rival that computes something else; how large it is belongs to the machine."""
    content = run("score_speed.py", tmp_path / "speed.json", "--device", "cpu")
    assert len(content["rows"]) == 6
    for row in content["rows"]:
        assert row["relative_error"] < 2e-3
        assert row["speedup_over_rival"] > 0
        assert row["share_of_copy_bandwidth"] > 0


def test_compaction_moves_little_and_frees_whole_pages(tmp_path):
    """Prevents copies beyond those that a strategy needs, and counting evicted tokens as memory."""
    rows = run("compact.py", tmp_path / "compact.json")["rows"]
    moves = {(row["strategy"], row["selection"]): row for row in rows if "bytes_moved" in row}
    assert moves["remap", "shared-mean"]["bytes_moved"] == 0
    for (strategy, _), row in moves.items():
        assert row["ratio_to_own_minimum"] <= 1.05
        assert strategy != "fill" or row["ratio_to_minimum"] <= 1.05
        assert strategy != "slide" or row["ratio_to_minimum"] > 5
    freed = {(row["page_size"], row["strategy"]): row["freed_share"] for row in rows if "freed_share" in row}
    assert freed[1, "none"] == freed[1, "remap"] == 1
    assert freed[128, "none"] < 0.05 < 0.98 < freed[128, "fill"]


def test_no_figure_for_unequal_answers(monkeypatch):
    """Prevents a speed-up from being reported that comes from computing something else."""
    monkeypatch.syspath_prepend(str(FOLDER))
    speed = importlib.import_module("score_speed")
    plain = speed.rival
    shape = (speed.MODELS[2], 1, 1, 64, "cpu", 1)
    assert speed.measure(*shape)["relative_error"] < 2e-3
    monkeypatch.setattr(speed, "rival", lambda *given: [1.01 * answer for answer in plain(*given)])
    with pytest.raises(SystemExit, match="differ"):
        speed.measure(*shape)


def test_plots_are_drawn_from_the_committed_figures(monkeypatch, tmp_path):
    """Prevents figures and the script that draws them from drifting apart."""
    monkeypatch.syspath_prepend(str(FOLDER))
    plot = importlib.import_module("plot")
    for path in plot.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    plot.main()
    for name in plot.DRAWN:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
