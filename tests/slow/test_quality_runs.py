"""The quality benchmarks, run as users run them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from benchmarks import plot
from checkout import ROOT
from quality_cases import random_stats
from sglang_triattn.stats.file import save_stats


@pytest.mark.wide
def test_a_quick_run_of_quality(folder, model, tmp_path):
    """Prevents a benchmark that does not run as users run it, leaves a policy out, or cannot be drawn."""
    save_stats(random_stats(model), tmp_path / "stats.safetensors")
    out = tmp_path / "quality.json"
    command = [sys.executable, "-m", "benchmarks.quality", "--quick", "--model", str(folder), "--json", str(out)]
    command += ["--stats", str(tmp_path / "stats.safetensors")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert set(content) == {"command", "date", "quick", "machine", "versions", "setting", "rows"}
    assert len(content["setting"]["streams"]) == 3
    rows = content["rows"]
    assert set(rows[0]) == {"task", "share", "policy", "questions", "right", "logprob", "low", "high"}
    policies = {row["policy"] for row in rows}
    assert {"dense", "default", "union", "shared-mean", "per-head", "per-layer-head", "snapkv", "random"} < policies
    tasks = {row["task"] for row in rows}
    assert {"facts", "early", "words", "state", "text"} == tasks
    assert len(rows) == len(policies) * len(tasks) * 2
    for row in rows:
        assert row["low"] == row["high"] == 0 or row["policy"] != "default"
        assert row["right"] == 1 or (row["policy"], row["task"]) != ("dense", "text")
        assert row["policy"] in done.stdout
    plot.draw_quality(content, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.wide
@pytest.mark.parametrize("name", ["predict_attention", "calibration_texts"])
def test_a_quick_run_of_predictions(folder, model, tmp_path, name):
    """Prevents a benchmark that does not run as users run it."""
    save_stats(random_stats(model), tmp_path / "stats.safetensors")
    out, chats = tmp_path / "out.json", tmp_path / "model"
    shutil.copytree(folder, chats)
    (chats / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}\n{% endfor %}")
    command = [sys.executable, "-m", f"benchmarks.quality.{name}", "--quick"]
    command += ["--model", str(chats), "--json", str(out)]
    command += ["--stats", str(tmp_path / "stats.safetensors")] if name == "predict_attention" else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["rows"]
    captures = [row[kind] for row in rows if "criterion" in row for kind in ("attention", "output")]
    captures += [value for row in rows if "stream" in row for name, value in row.items() if name != "stream"]
    assert captures
    assert all(0 < capture < 1 for capture in captures)
