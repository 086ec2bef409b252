"""The commands and examples of README.md, docs/clients.md and docs/agents.md, exactly as written there.

tests/unit/tools/test_docs.py makes sure that no example there is untested.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import prepare_model
from checkout import ROOT
from documents import DOCS, README, example, section
from forked_servers import Forkserver, run_script, running_server
from harness import STRICT, Client, assert_pool_is_whole, compression
from launches import run_python
from server import port_is_free, running_process, wait_until_healthy

PORT = 30000
URL = f"http://localhost:{PORT}"
ROUNDS = (399 - 256) // 64
"""Rounds of a 400-token answer, whose last token is not computed, with the settings of the examples."""
CLIENTS = DOCS / "clients.md"


@pytest.fixture
def client(serve, chat_model):
    """A server with the package's default lengths."""
    flags = ("--triattention-budget", "2048", "--triattention-interval", "128", "--triattention-recent", "128")
    return serve(*flags, "--enable-cache-report", model=chat_model, tokenizer=True)


def run(tmp_path: Path, source: str, forkserver: Forkserver | None = None, **options) -> list[str]:
    """The lines that a script prints, in a new interpreter unless a forkserver is given."""
    script = tmp_path / "example.py"
    script.write_text(source)
    ended = run_script(forkserver, script, [], {}) if forkserver else run_python(str(script), **options)
    assert ended.code == 0, ended.output[-3000:]
    return ended.output.splitlines()


def test_curl(client):
    """Prevents an example that users copy from failing, or from compressing nothing."""
    command = example(README, "Quick start", "bash").replace(URL, client.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    report = compression(json.loads(done.stdout))
    assert report["rounds"] == ROUNDS
    sentence = "reports {rounds} rounds, {evicted_tokens} evicted tokens and {freed_slots} freed slots"
    assert sentence.format(**report) in " ".join(section(README, "Quick start").split())
    assert_pool_is_whole(client)


def test_openai(client, forkserver, tmp_path):
    """Prevents an example that users copy from failing."""
    source = example(CLIENTS, "OpenAI", "python").replace(URL, client.url)
    # A random model may end its answers at any time.
    source = source.replace("extra_body={", 'temperature=0, extra_body={"ignore_eos": True, ')
    before = client.totals()["rounds"]
    lines = run(tmp_path, source, forkserver)
    assert [line.startswith("CompletionUsage(completion_tokens=400") for line in lines] == [True, False] * 2
    reports = [ast.literal_eval(line) for line in lines[1::2]]
    assert client.totals()["rounds"] == before + sum(report["rounds"] for report in reports)
    assert all(report["rounds"] >= ROUNDS for report in reports)
    assert all("conversation" in report for report in reports)
    assert_pool_is_whole(client)


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}"""
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Repeats a tool call as the model wrote it, as the templates of models that call tools do."""
CALL = r'<tool_call>\n\{"name": "read_log", "arguments": \{"lines": 40\}\}\n</tool_call>'


@pytest.fixture
def agent_server(forkserver, tmp_path):
    """A server of a trained model: a grammar needs a tokenizer that knows the characters of JSON."""
    model, stats = prepare_model.prepare()
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    args = ["--enable-triattention", "--triattention-stats", str(stats), "--tool-call-parser", "qwen"]
    args += ["--chat-template", str(template), "--max-total-tokens", "6144", "--sleep-on-idle", "--dtype", "float32"]
    with running_server(forkserver, model, args, STRICT, tmp_path / "log") as server:
        yield Client(server)


@pytest.mark.wide
def test_agent(agent_server, tmp_path):
    """Prevents a tool loop that users copy from failing, compressing nothing, or starting its conversation afresh."""
    source = example(DOCS / "agents.md", "A tool loop", "python").replace(URL, agent_server.url)
    # The model is too small to call tools by itself, and would end its answers before their first round.
    grammar = f'"regex": {CALL!r} if messages[-1]["role"] == "user" else None'
    ends = '"ignore_eos": messages[-1]["role"] == "tool"'
    source = source.replace("extra_body={", f"temperature=0, extra_body={{{grammar}, {ends}, ")
    # It is slow, too, so answers and budget are shorter.
    source = source.replace("max_tokens=400", "max_tokens=80")
    source = source.replace('"budget": 256, "interval": 64', '"budget": 48, "interval": 8')
    reports = [ast.literal_eval(line) for line in run(tmp_path, source)]
    assert [report["conversation"] for report in reports] == ["new", "new", "resumed", "resumed"]
    assert [report["conversation_kept"] for report in reports] == [False, True, True, True]
    called, answered, again, last = reports
    assert called["rounds"] == 0
    assert answered["rounds"] == (79 - 48) // 8
    # The second task and the second result of the tool stay, on top of the budget.
    assert last["frozen_length"] == again["frozen_length"] == answered["frozen_length"]
    assert last["protected_length"] > again["protected_length"] > answered["protected_length"] == 0
    assert last["physical_length"] <= last["frozen_length"] + last["protected_length"] + 48 + 8
    assert_pool_is_whole(agent_server)


def test_ollama(client):
    """Prevents an example that users copy from failing, and options that the documents name from being ignored."""
    command = example(CLIENTS, "Anthropic, the Responses API and Ollama", "bash").replace(URL, client.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=300, check=True)
    answer = json.loads(done.stdout)
    assert answer["done"]
    assert 0 < answer["eval_count"] <= 400
    assert answer["message"]["content"]
    assert_pool_is_whole(client)


def test_program(client, forkserver, tmp_path):
    """Prevents the example's backend from losing its settings, and the SGLang methods that it extends from moving."""
    lines = run(tmp_path, example(CLIENTS, "SGLang's frontend language", "python").replace(URL, client.url), forkserver)
    assert [report["rounds"] for report in ast.literal_eval(lines[-1])] == [ROUNDS, ROUNDS]
    assert_pool_is_whole(client)


@pytest.fixture(scope="module")
def user(tmp_path_factory):
    """The environment of a user with this Python on the PATH, whose statistics have not been measured yet."""
    folder = tmp_path_factory.mktemp("cache")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**STRICT, "PATH": path, "XDG_CACHE_HOME": str(folder)}


# Each of three processes imports everything, which `make demo` does too: it starts a server in the same way, also from
# the checkout. The flag alone is the first launch of test_auto_stats.py.
@pytest.mark.wide
@pytest.mark.parametrize("program", ["python -m sglang.launch_server", "sglang serve"])
def test_first_command(user, chat_model, tmp_path, program):
    """Prevents a first command that needs a flag that the README does not name, a GPU, a file, or another folder."""
    commands = re.findall(rf"(?:^    |`)({program} [^`\n]*)", section(README, "Quick start"), re.MULTILINE)
    assert [command.endswith(" --model-path M --enable-triattention") for command in commands] == [True]
    command = commands[0].replace(" M ", f" {chat_model.path} ")
    wait_for_port()
    with running_process(["bash", "-c", command], PORT, user, tmp_path / "server.log", folder=ROOT) as server:
        wait_until_healthy(server)
        client = Client(server)
        lengths = {"budget": 64, "interval": 32, "recent": 16}
        response = client.generate([5] * 20, 250, custom_params={"triattention": lengths})
        assert compression(response)["evicted_tokens"] == 160
        assert client.totals()["rounds"] == 5


def wait_for_port() -> None:
    """The commands name no port, so their servers use SGLang's default, which another test run may hold."""
    deadline = time.monotonic() + 300
    while not port_is_free(PORT):
        assert time.monotonic() < deadline, f"port {PORT} is taken: end the server that listens there"
        time.sleep(1)


@pytest.mark.wide
def test_engine(user, chat_model, tmp_path):
    """Prevents an example that users copy from failing, or from compressing nothing."""
    source = example(CLIENTS, "The offline engine", "python").replace('"M"', f'"{chat_model.path}"')
    lines = run(tmp_path, source, env=user, cwd=str(ROOT))
    reports = [ast.literal_eval(line) for line in lines if line.startswith("{'rounds'")]
    assert [report["rounds"] for report in reports] == [ROUNDS]
