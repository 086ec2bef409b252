"""How `top` and `verify` reach a server: past proxies, and through TLS; tests/server/test_tls.py has real servers."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

import certificates
from server import free_port
from sglang_triattn.cli import main as cli
from sglang_triattn.verify.connection import is_loopback

# Both commands end with a sentence that shows whose answer they got.
ANSWER = json.dumps({"internal_states": [{}]})
REACHED = "does not compress: start it with --enable-triattention."
COMMANDS = (["top", "--once"], ["verify"])
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "no_proxy")


@contextmanager
def answering(host: str = "127.0.0.1", pair: certificates.Pair | None = None):
    """The port of a server of the path `/prefix/server_info`, and the URLs that it is asked for; over TLS with `pair`.

    A proxy is asked for whole URLs, and gives the same answer to any.
    """
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200 if self.path.endswith("/prefix/server_info") else 404)
            self.end_headers()
            self.wfile.write(ANSWER.encode())

        def log_message(self, *_):
            pass

    class Server(HTTPServer):
        address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        def handle_error(self, *_):
            pass

    with Server((host, 0), Handler) as server:
        if pair is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pair.cert, pair.key)
            server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port, asked
        finally:
            server.shutdown()
            thread.join()


def sentence(capsys, command: list[str], *options: object) -> str:
    assert cli.main([*command, *map(str, options)]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert error.count("\n") == 1
    return error


@pytest.fixture
def proxied(monkeypatch):
    """The URLs that the environment's proxy is asked for."""
    with answering() as (port, asked):
        for name in PROXIES:
            monkeypatch.delenv(name, raising=False)
            monkeypatch.delenv(name.upper(), raising=False)
        for name in ("http_proxy", "https_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{port}")
        yield asked


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_this_machine_needs_no_proxy(capsys, proxied, command, host):
    """Prevents a proxy of the environment from being asked for a server on this machine, which it would take for its
    own machine."""
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with answering("127.0.0.1" if host == "localhost" else host) as (port, asked):
        place = f"[{host}]" if ":" in host else host
        assert REACHED in sentence(capsys, command, "--url", f"http://{place}:{port}/prefix")
    assert asked == ["/prefix/server_info"]
    assert not proxied


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_other_machines_are_asked_through_the_proxy(capsys, proxied, monkeypatch, command):
    """Prevents a server from being out of reach where all of the network is reached through a proxy, and no_proxy from
    going unheard."""
    url = "http://server.invalid:30000/prefix"
    assert REACHED in sentence(capsys, command, "--url", url)
    assert proxied == [f"{url}/server_info"]
    monkeypatch.setenv("no_proxy", "server.invalid")
    assert "answer" in sentence(capsys, command, "--url", url)
    assert len(proxied) == 1


def test_names_of_this_machine():
    """Prevents a host that only looks like this machine from being asked without the proxy that leads to it."""
    for place in ("127.0.0.1:30000", "127.9.9.9", "localhost", "LOCALHOST.:80", "a.localhost", "[::1]:1", "0.0.0.0:1"):
        assert is_loopback(place), place
    for place in ("10.0.0.1:30000", "localhost.example:1", "127.0.0.1.example", "[fe80::1]:1", "1270.0.1", ""):
        assert not is_loopback(place), place


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return certificates.self_signed(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def https(pair):
    """The URL of a server with a certificate that signs itself."""
    with answering(pair=pair) as (port, _):
        yield f"https://127.0.0.1:{port}/prefix/"


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_certificates(capsys, https, pair, command):
    """Prevents a server with a certificate of its own from being out of reach, a certificate without a known issuer
    from being trusted without a word, and a traceback for it."""
    for trust in (["--cacert", pair.cert], ["--insecure"]):
        assert REACHED in sentence(capsys, command, "--url", https, *trust)
    error = sentence(capsys, command, "--url", https)
    assert f"The certificate of {https.rstrip('/')} is not trusted (self" in error
    assert "--cacert FILE" in error
    assert "--insecure" in error


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_certificate_of_another_server(capsys, https, tmp_path, command):
    """Prevents --cacert from trusting more than its file, and a name from going unchecked."""
    other = certificates.self_signed(tmp_path)
    assert "is not trusted (" in sentence(capsys, command, "--url", https, "--cacert", other.cert)
    with answering(host="127.0.0.2", pair=other) as (port, _):
        error = sentence(capsys, command, "--url", f"https://127.0.0.2:{port}", "--cacert", other.cert)
    assert "is not trusted (IP address mismatch, certificate is not valid for '127.0.0.2')" in error


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--cacert", "F", "--insecure"], "--cacert and --insecure contradict each other: give one of them."),
        (["--cacert", "missing.pem"], "--cacert is missing.pem, which cannot be read (No such file or directory): "),
        (["--cacert", "."], "--cacert is ., which cannot be read (Is a directory): "),
        (["--cacert", "KEY"], "which holds no certificate (NO_CERTIFICATE_OR_CRL_FOUND): give a file in PEM"),
    ],
    ids=["both", "missing", "folder", "key"],
)
def test_options_that_cannot_work(capsys, https, pair, command, options, words):
    """Prevents a traceback, or words of a library, for a mistake on the command line."""
    given = [pair.key if option == "KEY" else option for option in options]
    assert words in sentence(capsys, command, "--url", https, *given)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
@pytest.mark.parametrize("options", [["--cacert", "F"], ["--insecure"]], ids=lambda options: options[0])
def test_trust_without_tls(capsys, command, options):
    """Prevents a user from taking a connection for protected that is not."""
    error = sentence(capsys, command, "--url", "http://127.0.0.1:30000", *options)
    assert f"{options[0]} is for https, but --url is http://127.0.0.1:30000: give " in error


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_the_other_scheme(capsys, https, command):
    """Prevents a traceback where http:// is given for https://, or the other way round, or the port is another
    protocol's."""
    for url in (https.replace("https", "http"), "http://[::1", "http://h:99999"):
        assert sentence(capsys, command, "--url", url)
    with answering() as (port, _):
        assert "answer" in sentence(capsys, command, "--url", f"https://127.0.0.1:{port}")
    with speaking(b"220 mail.example ESMTP\r\n") as port:
        assert "answer" in sentence(capsys, command, "--url", f"http://127.0.0.1:{port}")


@contextmanager
def speaking(words: bytes):
    """The port of a server that sends this to one client, for any request."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            client, _ = server.accept()
            with client:
                client.recv(1 << 16)
                client.sendall(words)

        thread = threading.Thread(target=answer)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_nothing_listens(capsys):
    """Prevents another sentence for https than for http."""
    for command in COMMANDS:
        assert "Connection refused" in sentence(capsys, command, "--url", f"https://127.0.0.1:{free_port()}")
