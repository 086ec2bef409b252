"""The serving benchmarks run, and measure what they say."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import warm
from checkout import ROOT
from harness import own_core

FOLDER = ROOT / "benchmarks"
ONE_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": str(own_core())}


@pytest.fixture
def run_quick(forkserver, monkeypatch, tmp_path):
    """`run_quick(name)` runs a benchmark with servers that start in seconds, and returns what it wrote."""
    monkeypatch.syspath_prepend(str(FOLDER))

    def running_server(model: str, args: list[str], log_path: Path):
        return warm.running_server(forkserver, Path(model), args, ONE_CORE, log_path)

    def run(name: str) -> dict:
        monkeypatch.setattr(importlib.import_module("serving"), "running_server", running_server)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json", str(tmp_path / "out.json")])
        importlib.import_module(name).main()
        return json.loads((tmp_path / "out.json").read_text())

    return run


@pytest.mark.parametrize("name", ["agents", "capacity"])
def test_command(name):
    """Prevents a benchmark that does not run as the command in its docstring."""
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--quick" in done.stdout


def test_capacity(run_quick):
    """Prevents comparing servers that do not finish the same requests, or that retract to keep them running."""
    content = run_quick("capacity")
    for name in ("plain", "compressed"):
        assert content[name]["finished"] == content["setting"]["requests"]
        assert content[name]["retractions"] == 0
    assert content["compressed"]["peak_slots"] <= content["setting"]["pool"]


def test_agents(run_quick):
    """Prevents turns counted as resumed that prefill earlier text again, and exact turns that are not exact."""
    content = run_quick("agents")
    exact, continued, setting = content["exact"], content["continued"], content["setting"]
    assert exact["answers_equal_cold"]
    assert continued["starts"] == [["new"], *[["resumed"]] * (setting["turns"] - 1)]
    # The message, and the last sampled token, whose K/V has not been computed.
    assert all(tokens == setting["message"] + 1 for tokens in continued["prefilled_tokens_per_turn"][1:])
    assert all(tokens > setting["tokens"] / 2 for tokens in exact["prefilled_tokens_per_turn"][1:])
