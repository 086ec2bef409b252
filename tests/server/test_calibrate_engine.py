"""`sglang-triattn calibrate --engine sglang` on a real engine, compared with the same calibration by transformers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import HunYuanDenseV1Config, LlamaConfig

import harness
from forked_servers import run_command, running_server
from launches import Ended
from server import session_members
from sets import wide
from sglang_triattn.calibration.job import CalibrationJob
from sglang_triattn.calibration.transformers_engine import calibrate, run_job
from sglang_triattn.stats.file import QueryStats, load_stats
from sglang_triattn.variable import VARIABLE
from tiny_model import END, VOCABULARY
from word_tokenizer import text, with_tokenizer

COMMAND = str(Path(sys.executable).with_name("sglang-triattn"))
SERVER = ["--", "--max-total-tokens", str(harness.POOL)]
# The first save comes after 8,192 tokens, so an interrupt then comes well before the end.
MANY_TOKENS = 16_000


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory) -> Path:
    """The tiny model with a word tokenizer, a long text, and chats."""
    folder = tmp_path_factory.mktemp("calibrate")
    with_tokenizer(tiny, folder / "model")
    (folder / "text.txt").write_text(text(0, MANY_TOKENS))
    (folder / "short.txt").write_text(text(1, 600))
    chats = [{"messages": [{"role": "user", "content": text(2, 90)}, {"role": "assistant", "content": text(3, 200)}]}]
    chats += [[{"from": "human", "value": text(4, 40)}, {"from": "gpt", "value": text(5, 80)}]]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    return folder


def arguments(folder: Path, out: str, *options: str) -> list[str]:
    words = ["calibrate", "--engine", "sglang", "--model", str(folder / "model"), "--out", str(folder / out)]
    return [*words, "--device", "cpu", *options]


@pytest.fixture
def run(forkserver, folder, tmp_path):
    """`run(out, *options, env=...)` calibrates and returns when the command has ended."""

    def run(out: str, *options: str, env: dict[str, str] | None = None) -> Ended:
        return run_command(forkserver, tmp_path, arguments(folder, out, *options), {**harness.STRICT, **(env or {})})

    return run


def unsupported_model(folder: Path, name: str) -> Path:
    """Configuration and tokenizer, without weights, of a model that changes its frequencies in long texts
    ("long-rope"), or whose layers share KV ("shared-kv")."""
    target = folder / name
    shutil.copytree(folder / "model", target, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    if name == "long-rope":
        rope = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
        rope |= {"rope_theta": 1e4, "original_max_position_embeddings": 512}
        config = LlamaConfig(**sizes, max_position_embeddings=1024, rope_parameters=rope)
        config.architectures = ["LlamaForCausalLM"]
    else:
        config = HunYuanDenseV1Config(**sizes, use_cla=True, architectures=["HunYuanDenseV1ForCausalLM"])
    config.save_pretrained(target)
    return target


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


def assert_agree(one: QueryStats, other: QueryStats) -> None:
    assert (one.token_count, one.num_kv_heads, one.head_dim) == (other.token_count, other.num_kv_heads, other.head_dim)
    assert one.fingerprint == other.fingerprint
    for name in ("mean", "abs_mean", "lookups"):
        if (expected := getattr(other, name)) is None:
            assert getattr(one, name) is None
        else:
            far = difference(getattr(one, name), expected)
            print(f"{name} differs by {far:.2e}")
            assert far < 1e-2
    assert difference(one.mean, other.mean.roll(1, dims=1)) > 0.1, "the heads are all equal, so nothing was compared"


def assert_all_end(session: int) -> None:
    """Asserts that all processes of the session end; one that has closed its files may still be about to."""
    last = time.monotonic() + 10
    while session_members(session) and time.monotonic() < last:
        time.sleep(0.05)
    assert session_members(session) == []


@pytest.mark.wide
def test_interrupted_calibration_goes_on_and_agrees_with_transformers(run, folder):
    """Prevents leftover processes or half-written files after Ctrl-C, lost or doubled texts, and wrongly un-rotated
    queries."""
    files = ["--data", str(folder / "chats.jsonl"), "--data", str(folder / "text.txt")]
    options = [*files, "--max-tokens", str(MANY_TOKENS), "--window", "1024", *SERVER]
    command = [sys.executable, COMMAND, *arguments(folder, "s.safetensors", *options)]
    before = set(folder.iterdir())
    environment = {**os.environ, **harness.STRICT, "HF_HUB_OFFLINE": "1"}
    # A shell that starts the tests in the background makes them ignore the signal that a user's Ctrl-C sends.
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    partial = folder / "s.partial.safetensors"
    while not partial.exists() and process.poll() is None:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors[-3000:]
    assert errors.endswith(f"sglang-triattn: interrupted, the same command goes on from {partial}\n")
    assert "Traceback" not in errors
    assert_all_end(process.pid)
    assert set(folder.iterdir()) - before == {partial}
    with safe_open(partial, framework="pt") as file:
        assert 0 < int(file.metadata()["count"]) < MANY_TOKENS

    ended = run("s.safetensors", *options)
    assert ended.code == 0, ended.output[-3000:]
    assert "going on after" in ended.output
    assert set(folder.iterdir()) - before == {folder / "s.safetensors"}
    paths = [str(folder / "chats.jsonl"), str(folder / "text.txt")]
    expected = calibrate(str(folder / "model"), paths, max_tokens=MANY_TOKENS, window=1024, device="cpu")
    assert_agree(load_stats(folder / "s.safetensors"), expected)


@pytest.mark.wide
def test_tensor_parallel_ranks_measure_their_own_heads(run, folder):
    """Prevents heads, or weights of look-ups, from being lost, doubled or reordered when they are split over ranks."""
    files = [str(folder / "short.txt"), str(folder / "chats.jsonl")]
    options = ["--data", files[0], "--data", files[1], "--look-ups", *SERVER, "--tp", "2"]
    ended = run("tp.safetensors", *options, env=harness.two_cores())
    assert ended.code == 0, ended.output[-3000:]
    expected = calibrate(str(folder / "model"), files, device="cpu", lookups=True)
    assert_agree(load_stats(folder / "tp.safetensors"), expected)


LOOKED_UP = {"lookup_texts": (tuple(range(3, 90)), tuple(range(250, 170, -1))), "lookup_request": (4, 7)}
# Measures traces, windows and look-ups before the server serves, and reports what the traces were.
_SERVING = f"""
import os
from pathlib import Path
from sglang_triattn.calibration.job import CalibrationJob

def calibrate_first(_, scheduler, *rest, **more):
    from sglang_triattn.patches.calibration.measure import calibrate_scheduler, _Run
    from sglang_triattn.stats import save_stats
    job = CalibrationJob(
        windows=(tuple(range(3, 300)),), prompts=((5, 6, 7), (8, 9)), trace_tokens=150, **{LOOKED_UP}
    )
    choose, chosen = _Run._choose, []
    _Run._choose = lambda self, *a: chosen.append(choose(self, *a)) or chosen[-1]
    stats = calibrate_scheduler(scheduler, job)
    Path(os.environ["CHOSEN"]).write_text(repr(chosen))
    save_stats(stats, os.environ["MEASURED"])

def activate():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.__init__", calibrate_first, HookType.AFTER)
"""


def test_scheduler_serves_after_calibration(forkserver, tiny, tmp_path):
    """Prevents slots or rows lost to calibration, traces with queries other than those of their own text, and look-ups
    of other queries, keys, values or heads."""
    harness.install_plugin(tmp_path, "calibrating", _SERVING)
    chosen, measured = tmp_path / "chosen", tmp_path / "measured.safetensors"
    env = {**harness.STRICT, "PYTHONPATH": harness.python_path(tmp_path)}
    env |= {"CHOSEN": str(chosen), "MEASURED": str(measured)}
    log = tmp_path / "log"
    arguments = [*harness.plain_args(), "--page-size", "16"]
    with running_server(forkserver, tiny.path, arguments, env, log) as server:
        client = harness.Client(server)
        client.generate_all([harness.prompt(seed, 40) for seed in range(4)], 60)
        client.flush()
        client.assert_alive()
    steps = json.loads(chosen.read_text())
    traces = [[5, 6, 7], [8, 9]]
    alive = traces
    for tokens in steps:
        alive = [trace for trace, token in zip(alive, tokens, strict=True) if token != END]
        for trace, token in zip(alive, (token for token in tokens if token != END), strict=True):
            trace.append(token)
    # The same texts again, each in one pass.
    again = CalibrationJob(windows=(tuple(range(3, 300)), *map(tuple, traces)), **LOOKED_UP)
    expected = run_job(str(tiny.path), again, device="cpu", dtype="float32", progress=False)
    assert expected.token_count > 400
    assert_agree(load_stats(measured), expected)


def test_model_is_calibrated_on_its_own_traces(run, folder):
    """Prevents --self from needing a text, or from measuring only prompts, and settings of servers from stopping it."""
    env = {VARIABLE: "--enable-triattention"}
    ended = run("self.safetensors", "--self", "2", "--self-tokens", "300", *SERVER, env=env)
    assert ended.code == 0, ended.output[-3000:]
    stats = load_stats(folder / "self.safetensors")
    assert stats.token_count > 300
    assert not (folder / "self.partial.safetensors").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--", "--pp-size", "2"], "--pp-size 2 does not work with calibrate"),
        wide(
            ["--model", "long-rope"],
            "long-rope (LlamaForCausalLM) cannot be calibrated in a context of more than 512 tokens, because SGLang",
            id="long-rope",
        ),
        (
            ["--model", "shared-kv"],
            "shared-kv (HunYuanDenseV1ForCausalLM) cannot be calibrated, because its layers share KV with one another",
        ),
        wide(
            ["--", "--enable-triattention", "--triattention-stats", "x"],
            "has no place in a calibration",
            id="compressed",
        ),
        wide(
            ["--look-ups", "--window", "256", *SERVER, "--chunked-prefill-size", "256"],
            "Look-ups need texts of 256 tokens, read twice in one prefill, but the server has room for 256 tokens",
            id="short-prefills",
        ),
    ],
    ids=["pp", None, "shared-kv", None, None],
)
def test_what_cannot_be_calibrated_is_refused(run, folder, options, words):
    """Prevents a user's mistake from ending in a traceback or a long start."""
    if options[0] == "--model":
        options = ["--model", str(unsupported_model(folder, options[1]))]
    ended = run("r.safetensors", "--data", str(folder / "text.txt"), *options)
    assert ended.code == 2, ended.output[-3000:]
    assert words in ended.output
    assert ended.output.rstrip().splitlines()[-1].startswith("sglang-triattn: ")
    assert "Traceback" not in ended.output
    assert not (folder / "r.safetensors").exists()
