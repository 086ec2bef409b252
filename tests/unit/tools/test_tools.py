"""The set-up, server and demonstration scripts, as far as they make decisions."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import demo
import env
import server
from checkout import ROOT

PYPROJECT = """
[project]
name = "x"
version = "{version}"
dependencies = ["torch"]
optional-dependencies = {{ dev = ["{dev}"] }}
"""


@pytest.fixture
def checkout(tmp_path):
    def write(name="checkout", version="1", dev="pytest", constraints="torch==1\n") -> Path:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        (root / "pyproject.toml").write_text(PYPROJECT.format(version=version, dev=dev))
        (root / "constraints.txt").write_text(constraints)
        return root

    return write


class TestEnvironment:
    def test_key_changes_with_what_is_installed_and_with_nothing_else(self, checkout):
        key = env.environment_key(checkout(), (3, 11))
        assert len(key) == 12
        assert int(key, 16) >= 0
        assert env.environment_key(checkout(version="2"), (3, 11)) == key
        others = [
            env.environment_key(checkout(), (3, 12)),
            env.environment_key(checkout(dev="ruff"), (3, 11)),
            env.environment_key(checkout(constraints="torch==2\n"), (3, 11)),
        ]
        assert len({key, *others}) == 4

    @pytest.fixture
    def installed(self, checkout, tmp_path, monkeypatch):
        """The pip commands of `prepare`, which run nothing but leave a python behind."""
        commands = []

        def record(command, lock, failure):
            commands.append([str(part) for part in command])
            if "venv" in commands[-1]:
                (Path(command[-1]) / "bin").mkdir(parents=True)
                (Path(command[-1]) / "bin" / "python").touch()

        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        monkeypatch.setattr(env, "_run", record)
        monkeypatch.setattr(env, "DISK_BYTES_NEEDED", 0)
        return commands

    def test_second_run_installs_nothing(self, checkout, installed):
        python = env.prepare(checkout())
        installed.clear()
        assert env.prepare(checkout()) == python
        assert installed == []

    def test_interrupted_install_is_done_again_from_nothing(self, checkout, installed):
        directory = env.prepare(checkout()).parents[1]
        (directory / env.MARKER).unlink()
        leftover = directory / "leftover"
        leftover.touch()
        installed.clear()
        env.prepare(checkout())
        assert len(installed) == 2
        assert not leftover.exists()

    def test_other_checkout_or_new_metadata_is_installed_without_dependencies(self, checkout, installed):
        env.prepare(checkout())
        for version in ("1", "2"):
            root = checkout(name="other", version=version)
            installed.clear()
            env.prepare(root)
            (command,) = installed
            assert command[-1] == str(root)
            assert "--no-deps" in command

    def test_full_disk_gives_one_sentence(self, checkout, installed, monkeypatch):
        monkeypatch.setattr(env, "DISK_BYTES_NEEDED", 10**18)
        with pytest.raises(SystemExit, match="XDG_CACHE_HOME"):
            env.prepare(checkout())
        assert installed == []

    def test_constraints_pin_every_direct_dependency(self):
        import tomllib

        pinned = {
            line.split("==")[0].lower().replace("_", "-")
            for line in (ROOT / "constraints.txt").read_text().splitlines()
            if "==" in line
        }
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"], "setuptools"]
        assert {name.split("==")[0] for name in wanted} <= pinned


SERVER_STUB = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# A leader that exits at once on SIGTERM, and a child of it that does not.
STUBBORN_FAMILY = "(trap '' TERM; while :; do sleep 0.1; done) & echo started; wait"


class TestServer:
    def test_stop_ends_the_whole_session(self):
        process = subprocess.Popen(["bash", "-c", STUBBORN_FAMILY], stdout=subprocess.PIPE, start_new_session=True)
        with process:
            assert process.stdout.readline() == b"started\n"
            assert len(server.session_members(process.pid)) >= 2
            server.stop_process(process, grace_s=0.5)
            assert server.session_members(process.pid) == []

    def test_stop_after_the_leader_has_died(self):
        process = subprocess.Popen(["bash", "-c", "sleep 600 & exit 3"], start_new_session=True)
        assert process.wait() == 3
        assert len(server.session_members(process.pid)) == 1
        server.stop_process(process)
        assert server.session_members(process.pid) == []

    def test_healthy_server_runs_outside_the_checkout_and_is_stopped(self, tmp_path):
        port = server.free_port()
        assert server.port_is_free(port)
        command = [sys.executable, "-c", SERVER_STUB, str(port)]
        with server.running_process(command, port, log_path=tmp_path / "logs" / "log") as handle:
            server.wait_until_healthy(handle, 30)
            assert not server.port_is_free(port)
            folder = Path(f"/proc/{handle.pid}/cwd").readlink()
            assert not folder.is_relative_to(ROOT)
        assert server.session_members(handle.pid) == []
        assert not folder.exists()

    def test_error_in_the_body_stops_the_server_too(self, tmp_path):
        command = ["sleep", "600"]
        with (
            pytest.raises(ZeroDivisionError),
            server.running_process(command, 1, log_path=tmp_path / "log") as handle,
        ):
            raise ZeroDivisionError
        assert server.session_members(handle.pid) == []

    def test_server_that_dies_shows_its_log(self, tmp_path):
        command = ["bash", "-c", "echo the reason; exit 3"]
        start = time.monotonic()
        with server.running_process(command, server.free_port(), log_path=tmp_path / "log") as handle:
            with pytest.raises(server.ServerError, match=r"(?s)the reason.*exit code 3") as caught:
                server.wait_until_healthy(handle, 30)
            assert str(tmp_path / "log") in str(caught.value)
        assert time.monotonic() - start < 10

    def test_user_arguments_come_last(self):
        command = server.launch_command("model", 1234, ["--port", "4321"])
        assert command.index("1234") < command.index("4321")


META = {
    "prompt_tokens": 300,
    "cached_tokens": 200,
    "completion_tokens": 700,
    "triattention": {
        "rounds": 5,
        "evicted_tokens": 600,
        "freed_slots": 590,
        "frozen_length": 200,
        "physical_length": 400,
        "logical_length": 1000,
    },
}


class TestDemo:
    def test_table_is_aligned_under_its_heads(self):
        rows = [demo.row("1", META), demo.row("2", META)]
        head, line, *body = demo.table(rows).splitlines()
        assert len({len(text) for text in (head, line, *body)}) == 1
        assert body[0].split() == ["1", "300", "200", "1,000", "400", "5", "600", "590"]
        assert head.index("freed slots") + len("freed slots") == len(head)

    def test_shared_prefix_is_counted_once(self):
        rows = [demo.row("1", META), demo.row("2", META)]
        assert demo.held_together(rows, "logical") == 800 + 800 + 200
        assert demo.held_together(rows, "physical") == 200 + 200 + 200
        assert "600 slots" in demo.summary(rows, peak=700)
        assert "1,800, 3.0 times" in demo.summary(rows, peak=700)

    def test_dense_server_is_not_taken_for_a_compacting_one(self):
        dense = {name: value for name, value in META.items() if name != "triattention"}
        with pytest.raises(server.ServerError, match="without TriAttention"):
            demo.row("1", dense)

    def test_shortened_keeps_both_ends(self):
        text = demo.shortened("begin " + "middle " * 200 + "end")
        assert text.split()[0] == "begin"
        assert text.split()[-1] == "end"
        assert "[...]" in text


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_python_prints_the_path_alone(tmp_path):
    stand_in = tmp_path / "python3"
    stand_in.write_text("#!/bin/sh\necho chatter >&2\necho /a/python\n")
    stand_in.chmod(0o755)
    output = subprocess.run(
        ["make", "-s", "python", f"PYTHON={stand_in}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout == "/a/python\n"
