"""The examples of the README's section Clients, as they stand there."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest
from launches import run_python

from harness import STRICT, assert_pool_is_whole, compression
from server import device_args

README = Path(__file__).parents[2] / "README.md"
URL = "http://localhost:30000"
ROUNDS = (399 - 256) // 64
"""Of an answer of 400 tokens, the last of which is not computed, with the settings of the examples."""


def example(kind: str, word: str) -> str:
    """The code block of this kind in the section that contains the word."""
    section = re.search(r"^## Clients\n(.*?)(?=^## |\Z)", README.read_text(), re.DOTALL | re.MULTILINE).group(1)
    found = [
        block for block in re.findall(rf"^```{kind}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE) if word in block
    ]
    assert len(found) == 1, f"the section Clients has {len(found)} {kind} blocks with {word}"
    return found[0]


@pytest.fixture
def client(serve, talking):
    """A server with the lengths that the package has by default."""
    flags = ("--triattention-budget", "2048", "--triattention-interval", "128", "--triattention-recent", "128")
    return serve(*flags, "--enable-cache-report", model=talking, tokenizer=True)


def run(tmp_path: Path, source: str, **options) -> list[str]:
    """Lines that a script prints."""
    script = tmp_path / "example.py"
    script.write_text(source)
    ended = run_python(str(script), **options)
    assert ended.code == 0, ended.output[-3000:]
    return ended.output.splitlines()


def test_curl(client):
    """Prevents an example that users copy from failing, or from compressing nothing."""
    command = example("bash", "curl").replace(URL, client.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    assert compression(json.loads(done.stdout))["rounds"] == ROUNDS
    assert_pool_is_whole(client)


def test_openai(client, tmp_path):
    """Prevents an example that users copy from failing."""
    source = example("python", "import openai").replace(URL, client.url)
    # A random model ends its answers at any time.
    source = source.replace("extra_body={", 'temperature=0, extra_body={"ignore_eos": True, ')
    before = client.totals()["rounds"]
    lines = run(tmp_path, source)
    assert [line.startswith("CompletionUsage(completion_tokens=400") for line in lines] == [True, True]
    assert client.totals()["rounds"] >= before + 2 * ROUNDS
    assert_pool_is_whole(client)


def test_program(client, tmp_path):
    """Prevents the backend of the example from losing its settings, or SGLang's methods that it extends from moving."""
    lines = run(tmp_path, example("python", "sgl.function").replace(URL, client.url))
    assert [report["rounds"] for report in ast.literal_eval(lines[-1])] == [ROUNDS, ROUNDS]
    assert_pool_is_whole(client)


def test_engine(talking, tmp_path):
    """Prevents an example that users copy from failing, or from compressing nothing."""
    device = "".join(f', device="{name}"' for name in device_args()[1:])
    model = f'model_path="{talking.path}", triattention_stats="{talking.stats}", max_total_tokens=2048{device}'
    lines = run(tmp_path, example("python", "sglang.Engine").replace('model_path="M"', model), env=STRICT)
    reports = [ast.literal_eval(line) for line in lines if line.startswith("{'rounds'")]
    assert [report["rounds"] for report in reports] == [ROUNDS]
