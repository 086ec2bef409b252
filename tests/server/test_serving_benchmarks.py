"""The benchmarks of serving run, and what they measure is what they say."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import warm

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def capacity(nursery, monkeypatch):
    """benchmarks/capacity.py, with servers that start in seconds."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def running_server(model: str, args: list[str], log_path: Path):
        return warm.running_server(nursery, Path(model), args, {}, log_path)

    monkeypatch.setattr(importlib.import_module("serving"), "running_server", running_server)
    return importlib.import_module("capacity")


def test_capacity(capacity, monkeypatch, tmp_path):
    """Prevents a comparison of servers that do not finish the same requests, or that retract to keep them running."""
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["capacity.py", "--quick", "--json", str(out)])
    capacity.main()
    content = json.loads(out.read_text())
    for name in ("plain", "compressed"):
        assert content[name]["finished"] == content["setting"]["requests"]
        assert content[name]["retractions"] == 0
    assert content["compressed"]["peak_slots"] <= content["setting"]["pool"]


def test_agents(tmp_path):
    """Prevents turns that are counted as resumed but prefill what was said before, and exact ones that are not.

    And a benchmark of serving that does not run as the command that its docstring names.
    """
    out = tmp_path / "out.json"
    command = [sys.executable, str(FOLDER / "agents.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    exact, continued, setting = content["exact"], content["continued"], content["setting"]
    assert exact["answers_equal_cold"]
    assert continued["starts"] == [["new"], *[["resumed"]] * (setting["turns"] - 1)]
    # The message, and the last sampled token, whose K/V nobody has computed.
    assert all(tokens == setting["message"] + 1 for tokens in continued["prefilled_tokens_per_turn"][1:])
    assert all(tokens > setting["tokens"] / 2 for tokens in exact["prefilled_tokens_per_turn"][1:])
