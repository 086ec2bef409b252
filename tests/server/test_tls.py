"""`top` and `verify` on a server whose certificate signs itself; tests/unit/cli/test_connecting.py has the mistakes."""

from __future__ import annotations

import json
import time
import urllib.request

import certificates
import forked_servers
from harness import STRICT, compressed_args
from server import free_port
from sglang_triattn.cli import main as cli


def wait_until_ready(process, url: str, cert, log) -> None:
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=certificates.trusting(cert))
    )
    deadline = time.monotonic() + 300
    while True:
        try:
            opener.open(f"{url}/health", timeout=30).close()
            return
        except OSError:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)


def test_a_certificate_that_signs_itself(forkserver, tiny, tmp_path, capsys, monkeypatch):
    """Prevents a server with its own TLS from being out of reach of `top` and `verify`, also where the environment
    names a proxy."""
    pair, port, log = certificates.self_signed(tmp_path), free_port(), tmp_path / "log"
    flags = ["--ssl-certfile", str(pair.cert), "--ssl-keyfile", str(pair.key), "--fastapi-root-path", "/x"]
    command = ["sglang.launch_server", "--model-path", str(tiny.path), "--port", str(port), "--page-size", "1"]
    url = f"https://127.0.0.1:{port}"
    with forked_servers.running_process(forkserver, [*command, *compressed_args(tiny, *flags)], STRICT, log) as process:
        wait_until_ready(process, url, pair.cert, log)
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        assert cli.main(["top", "--url", url, "--once", "--json", "--interval", "0.1", "--cacert", str(pair.cert)]) == 0
        (replica,) = json.loads(capsys.readouterr().out)["replicas"]
        assert replica["running_requests"] == 0
        assert cli.main(["verify", "--url", url, "--json", "--insecure"]) == 0, capsys.readouterr().out
        assert json.loads(capsys.readouterr().out)["passed"]
        for options in (["top", "--once"], ["verify"]):
            assert cli.main([*options, "--url", url]) == 2
            assert "is not trusted" in capsys.readouterr().err
