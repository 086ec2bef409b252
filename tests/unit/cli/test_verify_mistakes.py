"""`sglang-triattn verify`: one sentence and status 2 where nothing can be verified."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from server import free_port
from sglang_triattn.cli import main as cli


@contextmanager
def answering(status: int, content: str):
    """The URL of a server that gives every GET the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def sentence(capsys, *options: str) -> str:
    assert cli.main(["verify", *options]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.startswith("sglang-triattn: ")
    assert error.count("\n") == 1
    return error


PLAIN = json.dumps({"internal_states": [{}, {}]})


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (200, "<html>", "not as an SGLang server does"),
        (200, "{}", "not as an SGLang server does"),
        (200, "[1]", "not as an SGLang server does"),
        (404, "nothing here", "not as an SGLang server does"),
        (401, '{"error": "Unauthorized"}', "refuses the API key (status 401): give the server's with --api-key"),
        (503, '{"error": {"message": "warming up."}}', "status 503 (warming up): see the server's log"),
        (200, PLAIN, "does not compress: start it with --enable-triattention"),
    ],
)
def test_other_servers(capsys, status, content, message):
    """Prevents tracebacks, and failed checks, where the URL is another server's."""
    with answering(status, content) as url:
        assert message in sentence(capsys, "--url", url)


def test_nothing_listens(capsys):
    """Prevents a traceback where nothing listens."""
    assert "does not answer (Connection refused)" in sentence(capsys, "--url", f"http://127.0.0.1:{free_port()}")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "localhost:30000"], "--url is localhost:30000, but it must look like http://host:30000."),
        (["--url", "http://"], "it must look like"),
        (["--url", "http://h", "--timeout", "0"], "--timeout is 0, but it must be greater than 0 seconds."),
    ],
)
def test_options(capsys, options, message):
    """Prevents options that fail later, in words of a library."""
    assert message in sentence(capsys, *options)
