"""The server and demonstration scripts, as far as they make decisions."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import demo
import server
from checkout import ROOT

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

    def test_server_that_has_lost_its_port_is_not_waited_for(self, tmp_path):
        """Prevents ten minutes of waiting for a server that SGLang keeps running without HTTP."""
        line = "ERROR: [Errno 98] error while attempting to bind on address ('127.0.0.1', 1): address already in use"
        start = time.monotonic()
        with (
            server.running_process(
                ["bash", "-c", f'echo "{line}"; sleep 600'], server.free_port(), log_path=tmp_path / "log"
            ) as handle,
            pytest.raises(server.PortTaken, match="another program has port"),
        ):
            server.wait_until_healthy(handle, 30)
        assert time.monotonic() - start < 20

    def test_server_that_ends_for_want_of_a_port_can_be_tried_again(self, tmp_path):
        """Prevents a test from failing because SGLang has drawn a port, next to the server's, that another one has."""
        line = "ValueError: rpc_port at 1 is not available in 30 seconds. rpc_port is used by a process already."
        command = ["bash", "-c", f'echo "{line}"; exit 1']
        with (
            server.running_process(command, server.free_port(), log_path=tmp_path / "log") as handle,
            pytest.raises(server.PortTaken, match="exit code 1"),
        ):
            server.wait_until_healthy(handle, 30)

    def test_server_that_dies_shows_its_log(self, tmp_path):
        command = ["bash", "-c", "echo the reason; exit 3"]
        start = time.monotonic()
        with server.running_process(command, server.free_port(), log_path=tmp_path / "log") as handle:
            with pytest.raises(server.ServerError, match=r"(?s)the reason.*exit code 3") as caught:
                server.wait_until_healthy(handle, 30)
            assert type(caught.value) is server.ServerError
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
