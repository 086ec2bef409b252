"""SGLANG_TRIATTENTION enables compression in launches whose settings a plugin cannot extend, or ends them.

What it may hold is in tests/unit/test_variable.py.
"""

from __future__ import annotations

import json
import re

import pytest

import forked_servers
from harness import (
    BUDGET,
    INTERVAL,
    RECENT,
    STRICT,
    Client,
    compression,
    plain_args,
    prompt,
    python_path,
)
from server import free_port
from sglang_triattn.variable import VARIABLE

ROUNDS = 5
"""Of a prompt of 20 tokens and an answer of 250."""


def settings(tiny, *more: str) -> str:
    words = ["--enable-triattention", "--triattention-stats", str(tiny.stats)]
    for name, value in (("budget", BUDGET), ("interval", INTERVAL), ("recent", RECENT)):
        words += [f"--triattention-{name}", str(value)]
    return " ".join([*words, *more])


def record_fields(model) -> dict:
    """What a program gives to `ServerArgs`."""
    return {
        "model_path": str(model.path),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_total_tokens": 6144,
        "sleep_on_idle": True,
        "random_seed": 1,
        "log_level": "info",
    }


BUILT_RECORD = """
import json, sys
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    launch_server(ServerArgs(**json.loads(sys.argv[1])))
"""


def test_a_record_that_a_program_built(forkserver, tiny, tmp_path):
    """Prevents a dense server where a program calls `launch_server`, which resolves settings before plugins load."""
    (tmp_path / "built_record.py").write_text(BUILT_RECORD)
    port, log = free_port(), tmp_path / "server.log"
    command = ["built_record", json.dumps({**record_fields(tiny), "port": port})]
    env = {**STRICT, "PYTHONPATH": python_path(tmp_path), VARIABLE: settings(tiny)}
    with forked_servers.running_launch(forkserver, command, port, env, log) as server:
        client = Client(server)
        report = compression(client.generate(prompt(1, 20), 250))
        assert report["rounds"] == ROUNDS
        assert client.totals()["evicted_tokens"] == report["evicted_tokens"] == 160
        assert [client.totals()[name] for name in ("budget", "interval", "recent")] == [BUDGET, INTERVAL, RECENT]
    assert "TriAttention is active" in log.read_text()


RUNTIME = """
import json, sys
import requests
import sglang

if __name__ == "__main__":
    fields, request = json.loads(sys.argv[1])
    runtime = sglang.Runtime(**fields)
    answer = requests.post(runtime.url + "/generate", json=request).json()
    print("REPORT", json.dumps(answer["meta_info"]["triattention"]))
    runtime.shutdown()
"""


@pytest.mark.wide
def test_runtime(forkserver, tiny, tmp_path):
    """Prevents a dense server of `sglang.Runtime`, which hands its settings to a process of its own."""
    script = tmp_path / "runtime.py"
    script.write_text(RUNTIME)
    sampling = {"max_new_tokens": 250, "temperature": 0, "ignore_eos": True}
    fields = {**record_fields(tiny), "port": free_port()}
    words = json.dumps([fields, {"input_ids": prompt(1, 20), "sampling_params": sampling}])
    ended = forked_servers.run_script(forkserver, script, [words], {**STRICT, VARIABLE: settings(tiny)})
    assert ended.code == 0, ended.output[-3000:]
    (report,) = re.findall(r"REPORT (.*)", ended.output)
    assert json.loads(report)["rounds"] == ROUNDS


def last_evicted(log: str) -> int:
    """Evicted tokens that the newest decode line of a server's log counts."""
    return int(re.findall(r"evicted tokens: (\d+)", log)[-1])


def server_flags(model) -> list[str]:
    flags = [word for word in plain_args() if word != "--skip-tokenizer-init"]
    return ["--model-path", str(model.path), *flags, "--decode-log-interval", "20"]


@pytest.mark.wide
def test_one_batch_benchmark(forkserver, tiny, chat_model, tmp_path):
    """Prevents figures of a dense server where SGLang's benchmark was to measure compression."""
    command = ["sglang.bench_one_batch_server", *server_flags(chat_model), "--port", str(free_port())]
    command += ["--batch-size", "2", "--input-len", "20", "--output-len", "250", "--dataset-name", "random-ids"]
    command += ["--result-filename", str(tmp_path / "result.jsonl"), "--skip-warmup"]
    ended = forked_servers.run_module(forkserver, command, {**STRICT, VARIABLE: settings(tiny)}, tmp_path / "log")
    assert ended.code == 0, ended.output[-3000:]
    assert "TriAttention is active" in ended.output
    assert last_evicted(ended.output) > 0


@pytest.mark.wide
def test_offline_benchmark(forkserver, tiny, chat_model, tmp_path):
    """Prevents the same where the benchmark builds an Engine of its settings record."""
    texts = tmp_path / "texts.json"
    turns = [{"value": "w3 w4 w5"}, {"value": "w6"}]
    texts.write_text(json.dumps([{"conversations": turns}] * 20))
    command = ["sglang.benchmark.offline_throughput", *server_flags(chat_model), "--num-prompts", "2"]
    command += ["--dataset-name", "random", "--dataset-path", str(texts), "--random-range-ratio", "1"]
    command += ["--random-input-len", "20", "--random-output-len", "250", "--skip-warmup"]
    ended = forked_servers.run_module(forkserver, command, {**STRICT, VARIABLE: settings(tiny)}, tmp_path / "log")
    assert ended.code == 0, ended.output[-3000:]
    assert "TriAttention is active" in ended.output
    assert last_evicted(ended.output) > 0


# What a launch of a program's record does until it starts a process.
REFUSALS = """
import json, os, sys
from sglang.srt.server_args import ServerArgs

fields, cases, variable = json.loads(sys.argv[1])
for text, more in cases:
    record = ServerArgs(**{**fields, **more})
    record.resolve_once()
    os.environ[variable] = text
    from sglang.srt.plugins import load_plugins
    load_plugins()
    try:
        record.check_server_args()
        print("LAUNCHED", record._triattention.budget)
    except ValueError as error:
        print("REFUSED", error)
"""

NOT_STARTED = [
    ("--triattention-budget 64", {}, "REFUSED In the environment variable SGLANG_TRIATTENTION, --triattention-budget"),
    ("--enable-triattention", {"enable_two_batch_overlap": True}, "REFUSED --enable-two-batch-overlap does not work"),
    ("--enable-triattention --triattention-stats no.safetensors", {}, "REFUSED"),
    (
        "--enable-triattention",
        {"preferred_sampling_params": {"custom_params": {"triattention": 7}}},
        "REFUSED In --pre",
    ),
    ("--enable-triattention --triattention-budget 99", {}, "LAUNCHED 99"),
]


def test_a_record_that_a_program_built_is_checked(forkserver, tiny, tmp_path):
    """Prevents resolved settings from escaping the checks, of which SGLang's resolution usually calls most."""
    script = tmp_path / "refusals.py"
    script.write_text(REFUSALS)
    cases = [(text, more) for text, more, _ in NOT_STARTED]
    ended = forked_servers.run_script(forkserver, script, [json.dumps([record_fields(tiny), cases, VARIABLE])], {})
    lines = re.findall(r"^(?:REFUSED|LAUNCHED) .*$", ended.output, re.MULTILINE)
    assert len(lines) == len(NOT_STARTED), ended.output[-3000:]
    for line, (_, _, start) in zip(lines, NOT_STARTED, strict=True):
        assert line.startswith(start), line
