"""Every way to start SGLang starts a server that compresses.

The README's own commands are in test_readme_clients.py, keywords of `sglang.Engine` in test_jitter.py.
"""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import yaml

import forked_servers
from harness import BUDGET, INTERVAL, RECENT, STRICT, Client, compressed_args, compression, prompt, two_cores
from server import free_port
from sglang_triattn.config import OPTIONS, SWITCH, Config, flag


def assert_compresses(client: Client) -> None:
    report = compression(client.generate(prompt(1, 20), 250))
    assert report["rounds"] == 5
    assert client.totals()["evicted_tokens"] == report["evicted_tokens"] == 160


def test_config_file(forkserver, tiny, tmp_path):
    """Prevents flags that work only on a command line, and a profile that overrules the given flags."""
    port = free_port()
    arguments = ["--model-path", str(tiny.path), "--port", str(port), *compressed_args(tiny)]
    arguments += ["--triattention-profile", "aggressive"]
    settings = {}
    for word, following in pairwise([*arguments, "--"]):
        if word.startswith("--"):
            settings[word[2:]] = True if following.startswith("--") else following
    file = tmp_path / "server.yaml"
    file.write_text(yaml.safe_dump(settings))
    command = ["sglang.launch_server", "--config", str(file)]
    with forked_servers.running_launch(forkserver, command, port, STRICT, tmp_path / "server.log") as server:
        assert_compresses(Client(server))
        shown = Client(server).totals()
        assert [shown[name] for name in ("profile", "budget", "interval", "recent")] == [
            "aggressive", BUDGET, INTERVAL, RECENT,
        ]  # fmt: skip
    assert "TriAttention is active (profile aggressive)" in (tmp_path / "server.log").read_text()


@pytest.mark.wide
def test_data_parallel_replicas(serve):
    """Prevents a replica of the data-parallel controller from running dense."""
    client = serve("--page-size", "1", "--dp-size", "2", env=two_cores())
    responses = [client.generate(prompt(2, 20), 200) for _ in range(4)]
    assert {response["meta_info"]["dp_rank"] for response in responses} == {0, 1}
    assert {compression(response)["rounds"] for response in responses} == {4}
    serve.stop(client)  # its controller polls without a pause


def test_help_names_every_flag(forkserver, tmp_path):
    """Prevents settings that a user cannot find."""
    text = " ".join(
        forked_servers.run_module(forkserver, ["sglang.launch_server", "--help"], {}, tmp_path / "help").output.split()
    )
    defaults = {field.name: field.default for field in dataclasses.fields(Config)}
    assert SWITCH in text
    for option in OPTIONS:
        default = option.default_note if defaults[option.name] is None else defaults[option.name]
        described = text.split(f" {flag(option.name)} {option.metavar} ")[-1]
        assert described.partition("(default: ")[2].startswith(f"{default})"), option.name
