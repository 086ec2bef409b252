"""The serving benchmarks run, and measure what they say."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

import pytest

import forked_servers
from benchmarks import plot
from benchmarks.serving import capacity, modes, serve, servers, soak_watch, tool_loop
from checkout import ROOT
from harness import own_core
from plan_cases import QWEN3_32B
from sglang_triattn.cli import main as cli

ONE_CORE = {"SGLANG_CPU_OMP_THREADS_BIND": str(own_core())}


@pytest.fixture
def run_quick(forkserver, monkeypatch, tmp_path):
    """`run_quick(name, *options)` runs a benchmark with servers that start in seconds, and returns what it wrote."""

    def running_server(model: str, args: list[str], env: dict[str, str] | None, log_path: Path):
        return forked_servers.running_server(forkserver, Path(model), args, {**ONE_CORE, **(env or {})}, log_path)

    def run(name: str, *options: str) -> dict:
        monkeypatch.setattr(servers, "running_server", running_server)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--quick", "--json", str(tmp_path / "out.json"), *options])
        importlib.import_module(f"benchmarks.serving.{name}").main()
        content = json.loads((tmp_path / "out.json").read_text())
        if draw := plot.DRAWN.get(name):
            draw(content, tmp_path / "out.png")
            assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
        return content

    return run


@pytest.mark.parametrize(
    "name",
    ["acceptance", "agents", "capacity", "first_token", "modes", "serve", "soak", "tool_loop", "tool_loop_reads"],
)
def test_command(forkserver, tmp_path, name):
    """Prevents a benchmark that does not run as the command in its docstring."""
    command = [f"benchmarks.serving.{name}", "--help"]
    ended = forked_servers.run_module(forkserver, command, {"PYTHONPATH": str(ROOT)}, tmp_path / "log")
    assert ended.code == 0, ended.output
    assert "--quick" in ended.output


@pytest.mark.wide
def test_capacity(run_quick):
    """Prevents comparing servers that do not finish the same requests, or that retract to keep them running."""
    content = run_quick("capacity")
    for name in ("plain", "compressed"):
        assert content[name]["finished"] == content["setting"]["requests"]
        assert content[name]["retractions"] == 0
    assert content["compressed"]["peak_slots"] <= content["setting"]["pool"]
    # A reader of --quick sees what the whole benchmark shows: three dense requests fit, or all of the compacted ones.
    assert content["ratios"]["mean_running"] > 2


@pytest.mark.wide
def test_capacity_of_a_shape(run_quick):
    """Prevents a shape that no server serves, and options that do not reach the requests."""
    content = run_quick("capacity", "--shape", "Toy", "--requests", "3", "--tokens", "200")
    assert "Toy" in content["setting"]["model"]
    for name in ("plain", "compressed"):
        assert content[name]["finished"] == 3
    assert content["compressed"]["peak_slots"] < content["plain"]["peak_slots"]


@pytest.mark.wide
def test_modes(run_quick):
    """Prevents ratios of servers that do not finish the same requests."""
    content = run_quick("modes", "--only", "overlap off")
    (row,) = content["rows"]
    assert row["flags"] == "--disable-overlap-schedule"
    for name in ("plain", "compressed"):
        assert row[name]["finished"] == content["setting"]["requests"]
    ratios = {key: row["compressed"][key] / row["plain"][key] for key in row["ratios"]}
    assert row["ratios"] == ratios
    # Full answers do not fit into the pool together, compacted ones do.
    sizes = capacity.QUICK
    assert capacity.SHARED + sizes.requests * (capacity.OWN + row["tokens"]) > sizes.pool
    bound = capacity.SHARED + sizes.requests * (capacity.OWN + sizes.budget + sizes.interval)
    assert row["compressed"]["peak_slots"] <= bound
    assert ratios["mean_running"] > 1


@pytest.mark.wide
def test_acceptance(run_quick):
    """Prevents figures of answers without rounds, and drafts that no longer hold after rounds: a model that drafts for
    itself keeps the tokens that it drafts for."""
    content = run_quick("acceptance")
    plain, compressed = content["rows"]
    assert plain["rounds"] == 0
    assert compressed["rounds"] >= 5 * content["setting"]["requests"]
    # By other tokens, it took on 1.1 a step.
    assert compressed["after"] > 0.9 * compressed["before"] > 0.9 * 1.5


def test_the_modes_are_compressed():
    """Prevents a way of serving in the benchmark that the launch refuses."""
    for name, mode in modes.MODES.items():
        assert cli.main(["check", "--model", str(QWEN3_32B), *mode.args]) == 0, name


@pytest.mark.wide
def test_agents(run_quick):
    """Prevents turns counted as resumed that prefill earlier text again, and exact turns that are not exact."""
    content = run_quick("agents")
    exact, setting = content["exact"], content["setting"]
    assert exact["answers_equal_cold"]
    for name in ("continued", "found"):
        assert content[name]["starts"] == [["new"], *[["resumed"]] * (setting["turns"] - 1)]
        # The message, and the last sampled token, whose K/V has not been computed.
        assert all(tokens == setting["message"] + 1 for tokens in content[name]["prefilled_tokens_per_turn"][1:])
    assert all(tokens > setting["tokens"] / 2 for tokens in exact["prefilled_tokens_per_turn"][1:])


@pytest.mark.wide
def test_first_token(run_quick):
    """Prevents times of turns that prefill earlier text again, and parts of a time that are not all of it."""
    content = run_quick("first_token")
    sizes = content["setting"]
    for row in content["turns"]:
        later = row["turn"] > 1
        assert row["starts"] == ["none" if row["policy"] == "dense" else "resumed" if later else "new"]
        assert row["prefilled"] == (sizes["message"] + 1 if later else sizes["first"])
        assert 0 < row["forward_ms"] < row["ttft_ms"]
    last = [row for row in content["turns"] if row["turn"] == sizes["turns"]]
    assert [row["held"] < row["history"] for row in last] == [False, True, True]
    assert [row["part"] for row in content["growths"]] == ["ttft_ms", "forward_ms", "rest_ms"] * 3


@pytest.mark.wide
def test_tool_loop(run_quick):
    """Prevents answers of turns that were not served as their policy says, and inputs that are lost."""
    content = run_quick("tool_loop")
    turns = {(row["history"], row["policy"], row["turn"]): row for row in content["turns"]}
    last = content["setting"]["turns"]
    for (history, policy, turn), row in turns.items():
        resumed = history == "kept" and policy in tool_loop.RESUMED and turn > 1
        assert row["starts"] == ["resumed" if resumed else "none" if policy == "dense" else "new"]
    for policy in ("keep", "auto"):
        row = turns["kept", policy, last]
        assert row["held"] <= row["bound"]
        assert row["protected"] > turns["kept", policy, 2]["protected"]
    assert (
        turns["kept", "newest", last]["held"]
        < turns["kept", "keep", last]["held"]
        < turns["kept", "dense", last]["held"]
    )
    # A first token's time on a busy machine is no fault of the benchmark.
    judged = [goal for goal in content["goals"] if goal["at_most"] == 0 and "answers" not in goal["goal"]]
    assert judged
    assert all(goal["met"] for goal in judged), judged
    answers = {(row["history"], row["policy"], row["kind"]): row for row in content["answers"]}
    assert answers["kept", "dense", "inputs"]["right"] > 0
    assert answers["stripped", "auto", "inputs"]["lost"] == 0


@pytest.mark.wide
def test_serve(run_quick):
    """Prevents figures for rounds that did not run, for steps of another load, and goals that are not judged."""
    content = run_quick("serve")
    setting = content["setting"]
    for name in ("plain", "compressed"):
        compressed = name == "compressed"
        line = [row for row in content["context"] if row["server"] == name]
        assert [row["context"] for row in line] == setting["contexts"]
        assert [row["rounds"] > 0 for row in line] == [compressed] * len(line)
        (at_round,) = (row for row in content["rounds"] if row["server"] == name)
        assert at_round["rounds"] == compressed * setting["rounds"] * setting["requests"]
        (shared,) = (row for row in content["pool"] if row["server"] == name)
        assert shared["tokens_per_second"] > 0
    bursts = [(row["requests"], row["server"], row["rounds"] > 0) for row in content["burst"]]
    assert bursts == [(number, name, name != "plain") for number in setting["bursts"] for name in serve.BURST_SERVERS]
    assert [row["pairs"] for row in content["overhead"]] == [setting["pairs"]] * 2
    judged = [goal for goal in content["goals"] if goal["at_most"]]
    assert [goal["met"] for goal in judged] == [goal["ratio"] <= goal["at_most"] for goal in judged]
    assert len(judged) == 4


def test_the_gap_of_a_round_is_found():
    """Prevents the longest step at a round from being read where there is none."""
    sizes = serve.Sizes(budget=8, interval=4, rounds=2)
    gaps = [[0.1] * 24 for _ in range(2)]
    gaps[0][5], gaps[1][11], gaps[0][15] = 9.0, 0.4, 0.7
    assert serve.worst_at_rounds(gaps, sizes) == 0.7


@pytest.mark.wide
def test_soak(run_quick):
    """Prevents a soak that does not do what it says, or does not see the books."""
    content = run_quick("soak")
    assert content["faults"] == []
    assert content["counts"]["rounds"] > 0
    assert content["books"]["flushed"]["used"] == content["books"]["start"]["used"] == 0
    # Processes that the tests have forked have no title: the main one, the scheduler, the detokenizer and a spare one.
    assert len(content["memory"]) >= 3
    assert all(row["to_MB"] > 0 for row in content["memory"])
    assert content["samples"][-1]["seconds"] > content["samples"][0]["seconds"]


def test_the_soak_sees_what_grows():
    """Prevents a soak that calls everything flat, or noise growth."""
    seconds = [float(second) for second in range(400)]
    noise = [(37 * number) % 11 / 10 for number in range(400)]
    still, growing = (soak_watch.slope(seconds, [n + rate * s for n, s in zip(noise, seconds, strict=True)])
                      for rate in (0, 0.02))  # fmt: skip
    assert still["low"] < 0 < still["high"]
    assert growing["low"] < 72 < growing["high"]
    assert growing["low"] > 60
