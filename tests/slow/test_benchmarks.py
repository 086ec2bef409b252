"""The scorer benchmarks run, check what they time, and the traffic stays within its bound."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from triton.language import core

from benchmarks import gpu, plot
from benchmarks.overhead import census, host_cost, step
from benchmarks.quality import latent_spread
from benchmarks.rounds import compact, score_speed
from checkout import ROOT
from sglang_triattn.kernels import device_round, mover
from sglang_triattn.kernels.compact import list_moves_kernel


def run_in_a_process(name: str, out: Path, *options: str) -> tuple[dict, str]:
    """What the benchmark wrote as JSON, and what it printed."""
    command = [sys.executable, "-m", name, "--quick", "--json", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(out.read_text())
    assert set(content) == {"command", "date", "quick", "machine", "versions", "rows"}
    assert content["command"].startswith(f"python -m {name} --quick")
    return content, done.stdout


def run(name: str, out: Path, *options: str) -> dict:
    content, printed = run_in_a_process(name, out, *options)
    assert all(str(row["shape"]) in printed for row in content["rows"])
    return content


@pytest.mark.wide
def test_traffic_is_near_the_minimum(tmp_path):
    """Prevents a launch that reads keys, slots or columns more often than it must."""
    rows = run("benchmarks.rounds.score_traffic", tmp_path / "traffic.json")["rows"]
    shapes = {row["shape"] for row in rows}
    for model in ("Qwen3-8B", "Llama-3-8B", "SmolLM2-135M", "GLM-4.5"):
        for tokens in (2176, 16384):
            assert f"{model} 8x{tokens} bf16" in shapes
    assert {row["selection"] for row in rows} == {"scores only", "union", "shared-mean", "per-head", "default"}
    assert all(1 < row["ratio_to_minimum"] <= 1.10 for row in rows if row["selection"] != "default")
    # Moves of K/V included, compared with reading every key once.
    (default,) = (row for row in rows if (row["shape"], row["selection"]) == ("Qwen3-8B 8x2176 bf16", "default"))
    assert default["ratio_to_keys"] <= 2.2


@pytest.mark.wide
def test_speed_is_measured_on_equal_answers(tmp_path):
    """Prevents a speed-up over a rival that computes something else; its size depends on the machine."""
    content = run("benchmarks.rounds.score_speed", tmp_path / "speed.json", "--device", "cpu")
    assert len(content["rows"]) == 6
    for row in content["rows"]:
        assert row["relative_error"] < 2e-3
        assert row["speedup_over_rival"] == pytest.approx(row["rival_milliseconds"] / row["milliseconds"])
        assert min(row["milliseconds"], row["keep_milliseconds"], row["share_of_copy_bandwidth"]) > 0


@pytest.mark.wide
def test_compaction_moves_little_and_frees_whole_pages(tmp_path):
    """Prevents copies beyond those that a strategy needs, and counting evicted tokens as memory."""
    rows = run("benchmarks.rounds.compact", tmp_path / "compact.json")["rows"]
    moves = {(row["strategy"], row["selection"], row["recent"]): row for row in rows if "bytes_moved" in row}
    assert moves["remap", "shared-mean", 512]["bytes_moved"] == 0
    for (strategy, _, recent), row in moves.items():
        assert recent in (128, 512)
        assert strategy != "fill" or row["ratio_to_keys"] < 0.25
        assert row["ratio_to_own_minimum"] <= 1.05
        assert strategy != "fill" or row["ratio_to_minimum"] <= 1.05
        assert strategy != "slide" or row["ratio_to_minimum"] > 5
    freed = {(row["page_size"], row["strategy"]): row["freed_share"] for row in rows if "freed_share" in row}
    assert freed[1, "none"] == freed[1, "remap"] == 1
    assert freed[128, "none"] < 0.05 < 0.98 < freed[128, "fill"]


@pytest.mark.wide
def test_the_census_is_timed(tmp_path):
    """Prevents a benchmark that no longer runs on SGLang's own tree and allocators."""
    # In this process, which needs SGLang for the test below anyway: importing it takes longer than everything else.
    out = tmp_path / "census.json"
    census.main(["--quick", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {(row["requests"], row["page_size"]) for row in rows} == {(1, 1), (1, 16), (8, 1), (8, 16)}
    assert all(row["milliseconds"] > 0 for row in rows)


@pytest.mark.wide
def test_the_cost_of_metrics_is_measured(tmp_path):
    """Prevents a benchmark that no longer runs on the scheduler's metrics."""
    # It sets where prometheus_client writes, which servers started from here would inherit.
    content, _ = run_in_a_process("benchmarks.overhead.metrics", tmp_path / "cost.json")
    rows = content["rows"]
    assert [row["requests"] for row in rows] == [1, 32, 128]
    assert all(row["share"] < row["microseconds"] for row in rows)


def test_the_cost_of_a_step_is_measured(monkeypatch, tmp_path):
    """Prevents a benchmark that no longer runs the hooks of a step, and figures for hooks that see nothing."""
    out = tmp_path / "step.json"
    step.main(["--quick", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [row["requests"] for row in rows] == [1, 32, 128]
    assert all(set(row) == {"shape", "requests", "microseconds", "share"} for row in rows)
    monkeypatch.setattr(step.Hooked, "finds_rounds", lambda _: False)
    with pytest.raises(SystemExit, match="plan no round"):
        step.measure(1, 1, 1)


@pytest.mark.wide
def test_the_host_cost_of_rounds_is_measured(tmp_path):
    """Prevents a benchmark that no longer runs the scheduler's steps, rounds and admission."""
    # It gives Triton a driver, and sets how rounds are divided.
    content = run("benchmarks.overhead.host_cost", tmp_path / "host.json")
    rows = {(row["running"], row["mode"], row["rounds_per_step"]): row for row in content["rows"]}
    assert len(rows) == len(content["rows"]) == 14
    for running in (16, 256):
        idle, burst = rows[running, "idle", 0], rows[running, "burst", 0]
        assert idle["rounds"] == 0 < burst["rounds"] == running
        assert idle["launches"] < rows[running, "burst", "auto"]["launches"] < burst["launches"] * 8
        admission = rows[running, "admission", "auto"]
        assert min(admission["microseconds"], admission["plain_microseconds"]) > 0
    assert rows[256, "burst", "auto"]["rounds"] == 8


def test_no_host_cost_of_launches_with_wrong_arguments(monkeypatch):
    """Prevents figures for launches of kernels that would not do what rounds are for, and for another reservation."""
    host_cost.publish_settings()
    monkeypatch.setattr(device_round, "SLICE_BYTES", device_round.SLICE_BYTES)
    plain, cast = list_moves_kernel.list_moves_triton, core.cast
    with torch.inference_mode(), host_cost.null_driver():
        host_cost.check_arguments()
        assert core.cast is cast, "the language is left to the interpreter, and compiles no more kernels"
        wrong = lambda slots, *given, **named: plain(slots.flip(1), *given, **named)  # noqa: E731
        monkeypatch.setattr(list_moves_kernel, "list_moves_triton", wrong)
        with pytest.raises(SystemExit, match="does not hold what it should"):
            host_cost.check_arguments()
        server = host_cost.RunningServer(2)
        server.requests[0].triattention.reserve = 2
        with pytest.raises(SystemExit, match="admission reserves"):
            host_cost.admission(server, 1)


@pytest.mark.wide
def test_the_spread_of_latents_is_measured(tmp_path):
    """Prevents a choice by something else than the attention that is then measured, and a term that is never added."""
    out = tmp_path / "spread.json"
    latent_spread.main(["--quick", "--json", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert len(rows) == 12
    for row in rows:
        assert 0.5 < row["rank 0"] <= row["best"] <= 1
    steep = rows[-1]
    assert steep["rank 0"] < steep["rank 512"] < steep["best"]


def test_no_time_for_a_census_that_sees_nothing(monkeypatch):
    """Prevents figures for a check that is fast because it checks nothing."""
    census.publish_settings()
    case = 2, 256, 4096, 1, "cpu"
    assert census.milliseconds(census.scheduler_with(*case), 1) > 0
    monkeypatch.setattr("sglang_triattn.patches.observability.census.find_fault", lambda *_: None)
    with pytest.raises(SystemExit, match="does not notice a slot that is free and held"):
        census.milliseconds(census.scheduler_with(*case), 1)


def test_no_figure_for_unequal_answers(monkeypatch):
    """Prevents reporting a speed-up that comes from computing something else."""
    plain = score_speed.rival
    shape = (score_speed.MODELS[2], 1, 1, 64, "cpu", 1)
    assert score_speed.measure(*shape)["relative_error"] < 2e-3
    monkeypatch.setattr(score_speed, "rival", lambda *given: [1.01 * answer for answer in plain(*given)])
    with pytest.raises(SystemExit, match="differ"):
        score_speed.measure(*shape)


def test_no_time_for_a_compaction_that_loses_tokens(monkeypatch):
    """Prevents figures for copies that miss a kept token."""
    plain = compact.list_moves
    for selection, strategy in (("shared-mean", "remap"), ("shared-mean", "fill"), ("per-layer-head", "slide")):
        shape = (compact.MODELS[2], selection, strategy, 2, 300, 200, 128, "cpu", 2, 1)
        assert compact.milliseconds(*shape) > 0
        with monkeypatch.context() as broken:
            broken.setattr(mover, "list_moves", lambda *given, **cut: [x[..., 1:] for x in plain(*given, **cut)])
            broken.setattr(compact, "remap", lambda slots, kept: slots)
            with pytest.raises(SystemExit, match="loses kept tokens"):
                compact.milliseconds(*shape)


def test_gpu_benchmarks_need_a_gpu(monkeypatch, tmp_path):
    """Prevents CPU figures under a GPU's name, figures that are lost, and a quick run replacing a whole one."""
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="There is no CUDA device here"):
        gpu.main(["--json", str(tmp_path)])
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="is not a folder"):
        gpu.main(["--json", str(tmp_path / "none")])
    given = []
    monkeypatch.setattr(gpu, "machine", lambda: {"gpu": "NVIDIA H200 (80 GB)"})
    names = ("score_speed", "compact", "decode")
    for name in names:
        monkeypatch.setattr(gpu.BENCHMARKS[name], "main", given.append)
    gpu.main(["--json", str(tmp_path), "--layers", "3", "--repeats", "2"])
    gpu.main(["--json", str(tmp_path), "--quick"])
    gpu.main(["--json", str(tmp_path), "--only", "decode"])
    files = [Path(arguments[-1]) for arguments in given]
    assert [file.parent for file in files] == [tmp_path] * 7
    assert [file.stem for file in files] == [
        *(f"{name}-nvidia-h200-80-gb{end}" for end in ("", "-quick") for name in names),
        "decode-nvidia-h200-80-gb",
    ]
    assert given[0][:-2] == ["--device", "cuda", "--repeats", "2", "--layers", "3"]
    assert given[3][:-2] == ["--device", "cuda", "--quick"]


def test_plots_are_drawn_from_the_committed_figures(monkeypatch, tmp_path):
    """Prevents figures and the script that draws them from disagreeing."""
    for path in plot.RESULTS.glob("*.json"):
        (tmp_path / path.name).write_text(path.read_text())
    (tmp_path / "compact-some-gpu.json").write_text((plot.RESULTS / "compact.json").read_text())
    monkeypatch.setattr(plot, "RESULTS", tmp_path)
    plot.main()
    # decode needs a GPU and none of its figures are committed; tests/slow/test_gpu_decode.py draws a toy's.
    for name in {*plot.DRAWN, "compact-some-gpu", "quality-held-out"} - {"decode", "quality"}:
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
