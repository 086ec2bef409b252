"""The benchmarks of serving run, and what they measure is what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def run(tmp_path):
    def run(script: str) -> dict:
        out = tmp_path / "out.json"
        command = [sys.executable, str(FOLDER / script), "--quick", "--json", str(out)]
        done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=800)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text())

    return run


def test_capacity(run):
    """Prevents a comparison of servers that do not finish the same requests, or that retract to keep them running."""
    content = run("capacity.py")
    for name in ("plain", "compressed"):
        assert content[name]["finished"] == content["setting"]["requests"]
        assert content[name]["retractions"] == 0
    assert content["compressed"]["peak_slots"] <= content["setting"]["pool"]


def test_agents(run):
    """Prevents turns that are counted as resumed but prefill what was said before, and exact ones that are not."""
    content = run("agents.py")
    exact, continued, setting = content["exact"], content["continued"], content["setting"]
    assert exact["answers_equal_cold"]
    assert continued["starts"] == [["new"], *[["resumed"]] * (setting["turns"] - 1)]
    # The message, and the last sampled token, whose K/V nobody has computed.
    assert all(tokens == setting["message"] + 1 for tokens in continued["prefilled_tokens_per_turn"][1:])
    assert all(tokens > setting["tokens"] / 2 for tokens in exact["prefilled_tokens_per_turn"][1:])
