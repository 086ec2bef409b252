"""`sglang-triattn top`: mistakes, and frames at several widths; tests/server/test_metrics.py runs it on a server."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from server import free_port
from sglang_triattn.cli import main as cli
from sglang_triattn.cli.top import TOTALS, Look, frame_of
from sglang_triattn.cli.top_view import render


def state(requests: int = 3, generated: int = 40) -> dict:
    """A replica's internal state as `/server_info` has it, with the longest request first."""
    listed = [
        {
            "id": f"{number:04d}5f0c[bold]a66b9b",
            "logical": 4000 - number,
            "physical": 2000,
            "frozen": None if number else 128,
            "rounds": 16,
            "generated": generated,
        }
        for number in range(requests)
    ]
    report = {
        **dict.fromkeys(TOTALS, 1_234_567),
        "physical_tokens": 2000 * requests,
        "logical_tokens": 4000 * requests,
        "pool_slots": 10_000,
        "pool_free_slots": 3000,
        "pool_evictable_slots": 2000,
        "running_requests": requests,
        "waiting_requests": 2,
        "conversations_parked": 5,
        "conversations_resumed": 7,
        "requests": listed,
    }
    return {"triattention": report, "last_gen_throughput": 123.4}


def shown(frame: list[dict], width: int, height: int | None = None, fault: str | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, record=True, force_terminal=True)
    console.print(render("http://127.0.0.1:30000", frame, width, height, fault))
    return console.export_text().splitlines()


@pytest.mark.parametrize("width", [40, 54, 62, 72, 200])
def test_a_frame_fits_the_terminal(width):
    """Prevents lines that wrap in a narrow terminal, and numbers that are cut."""
    lines = shown(frame_of(Look(0, [state()]), Look(2, [state(generated=60)])), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    for words in ("4,000", "2,000", "10.0", "running 3, waiting 2", "50% of 10,000 slots"):
        assert words in text, words
    assert "…" in lines[-1], "ids are shortened"
    assert ("frozen" in text) == (width >= 72)


def test_a_short_terminal_shows_the_longest():
    """Prevents a heading that scrolls out of sight."""
    frame = frame_of(Look(0, [state(100)]), Look(2, [state(100)]))
    lines = shown(frame, 80, 24, "It does not answer.")
    assert len(lines) <= 24
    assert "sglang-triattn top" in lines[0]
    assert "It does not answer." in lines[1]
    assert any(line.startswith("00005") for line in lines)
    assert lines[-1].strip().endswith("more")


def test_replicas_are_distinguished():
    """Prevents requests of one data-parallel replica from being taken for another's."""
    before = Look(0, [state(1, 40), state(1, 40)])
    frame = frame_of(before, Look(2, [state(1, 60), state(1, 80)]))
    assert [one["requests"][0]["tokens_per_second"] for one in frame] == [10, 20]
    text = "\n".join(shown(frame, 100))
    assert "replica 0" in text
    assert "replica 1" in text
    # One that has started over, or is new, has no rate.
    assert frame_of(before, Look(2, [state(2, 30)]))[0]["requests"][0]["tokens_per_second"] is None


@pytest.fixture
def answering():
    """`answering(status, body)` returns the URL of a server that answers so."""
    servers = []

    def start(status: int, body: str) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((200, json.dumps({"internal_states": [{}]})), "does not compress: start it with --enable-triattention."),
        ((200, "<html>"), "is not the address of an SGLang server"),
        ((401, ""), "asks for an API key (status 401): give the server's with --api-key."),
        ((403, ""), "asks for an API key (status 403)"),
        ((500, ""), "answers with status 500: give the --url of an SGLang server."),
        (None, "No server answers at"),
    ],
    ids=["plain", "no JSON", "key", "key (403)", "broken", "nothing"],
)
def test_mistakes_give_one_sentence_and_status_2(answering, capsys, answer, words):
    """Prevents tracebacks for a server that is not there or does not compress."""
    url = f"http://127.0.0.1:{free_port()}" if answer is None else answering(*answer)
    assert cli.main(["top", "--url", url, "--once"]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_wrong_key_is_not_a_missing_one(answering, capsys):
    """Prevents telling a user who gave a key to give one."""
    assert cli.main(["top", "--url", answering(401, ""), "--once", "--api-key", "wrong"]) == 2
    assert "refuses this API key (status 401): give the server's with --api-key." in capsys.readouterr().err


def test_an_idle_server_has_no_speed():
    """Prevents the speed of the last request from standing there for ever once nothing runs."""
    (frame,) = frame_of(Look(0, [state(0)]), Look(2, [state(0)]))
    assert frame["tokens_per_second"] == 0
    assert "running 0, waiting 2, 0 tokens/s" in "\n".join(shown([frame], 80))


@pytest.mark.parametrize("width", [40, 54, 200])
def test_terminals_that_know_ascii_alone(answering, width):
    """Prevents a UnicodeEncodeError where the locale is C."""
    busy = state()
    busy["triattention"]["requests"][0]["id"] = "später-0123456789"
    url = answering(200, json.dumps({"internal_states": [busy]}))
    command = [sys.executable, "-P", "-c", "import sys; from sglang_triattn.cli.main import main; sys.exit(main())"]
    environment = {**os.environ, "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "COLUMNS": str(width)}
    options = ["top", "--url", url, "--once", "--interval", "0.01"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    lines = done.stdout.decode("ascii").splitlines()
    assert max(map(len, lines)) <= width
    assert any("#" in line and "50% of 10,000 slots" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--interval", "0", "--once"], "--interval is 0"),
        (["--json"], "give --once too"),
        ([], "not a terminal"),
        (["--url", "localhost", "--once"], "--url is localhost, but it must look like http://host:30000."),
        (["--url", "localhost:30000", "--once"], "--url is localhost:30000, but it must look like http://host:30000."),
    ],
)
def test_options_that_cannot_work(capsys, options, words):
    """Prevents a view without a terminal, and a loop that never waits."""
    assert cli.main(["top", *options]) == 2
    assert words in capsys.readouterr().err
