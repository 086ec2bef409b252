"""Every way to start SGLang starts a server that compresses."""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from launches import launch, run_python

from harness import STRICT, Client, compressed_args, compression, prompt, two_cores
from server import free_port, running_process, wait_until_healthy


def assert_compresses(client: Client) -> None:
    report = compression(client.generate(prompt(1, 20), 250))
    assert report["rounds"] == 5
    assert client.totals()["evicted_tokens"] == report["evicted_tokens"] == 160


@pytest.mark.parametrize("entrance", ["sglang serve", "config"])
def test_server_entrances(tiny, tmp_path, entrance):
    """Prevents flags that work with launch_server only."""
    port = free_port()
    arguments = ["--model-path", str(tiny.path), "--port", str(port), *compressed_args(tiny)]
    if entrance == "config":
        settings = {}
        for word, following in pairwise([*arguments, "--"]):
            if word.startswith("--"):
                settings[word[2:]] = True if following.startswith("--") else following
        file = tmp_path / "server.yaml"
        file.write_text(yaml.safe_dump(settings))
        command = [sys.executable, "-m", "sglang.launch_server", "--config", str(file)]
    else:
        command = [str(Path(sys.executable).parent / "sglang"), "serve", *arguments]
    with running_process(command, port, env=STRICT, log_path=tmp_path / "server.log") as server:
        wait_until_healthy(server)
        assert_compresses(Client(server))


ENGINE = """
import json, sys
import sglang

def main():
    settings, plain, ids = json.loads(sys.argv[1])
    results = {}
    for name, extra in (("compressed", settings), ("plain", {})):
        engine = sglang.Engine(**plain, **extra)
        sampling = {"max_new_tokens": 250, "temperature": 0, "ignore_eos": True}
        results[name] = engine.generate(input_ids=ids, sampling_params=sampling)["meta_info"].get("triattention")
        engine.shutdown()
    print("RESULTS" + json.dumps(results))

if __name__ == "__main__":
    main()
"""


def test_offline_engine(tiny, tmp_path):
    """Prevents keywords of sglang.Engine from being refused, and a second, plain Engine from compressing too."""
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    settings = {
        "enable_triattention": True,
        "triattention_stats": str(tiny.stats),
        "triattention_budget": 64,
        "triattention_interval": 32,
    }
    plain = {
        "model_path": str(tiny.path),
        "skip_tokenizer_init": True,
        "max_total_tokens": 2048,
        "dtype": "float32",
        "device": "cpu",
    }
    ended = run_python(str(script), json.dumps([settings, plain, prompt(1, 20)]), env=STRICT)
    line = next((line for line in ended.output.splitlines() if line.startswith("RESULTS")), None)
    assert line is not None, ended.output[-3000:]
    results = json.loads(line.removeprefix("RESULTS"))
    assert results["compressed"]["rounds"] == 5
    assert results["plain"] is None


def test_data_parallel_replicas(serve):
    """Prevents a replica behind the data-parallel controller from running dense."""
    client = serve("--page-size", "1", "--dp-size", "2", env=two_cores())
    responses = [client.generate(prompt(2, 20), 200) for _ in range(4)]
    assert {response["meta_info"]["dp_rank"] for response in responses} == {0, 1}
    assert {compression(response)["rounds"] for response in responses} == {4}
    serve.stop(client)  # its controller polls without a pause


def test_help_names_every_flag():
    """Prevents settings that a user cannot find."""
    text = " ".join(launch("--help").output.split())
    for words in (
        "--enable-triattention",
        "--triattention-stats auto|PATH",
        "(default: auto)",
        "--triattention-budget TOKENS",
        "(default: 2048)",
        "--triattention-interval TOKENS",
        "--triattention-recent TOKENS",
        "(default: 128",
        "--triattention-selection",
        "(default: shared-mean)",
        "--triattention-aggregation",
        "(default: mean)",
        "--triattention-budget-scope",
        "(default: private)",
        "--triattention-sinks TOKENS",
        "--triattention-prompt frozen|compact",
        "--triattention-pressure-budget TOKENS",
        "(default: the budget)",
        "--triattention-conversation-ttl SECONDS",
    ):
        assert words in text
