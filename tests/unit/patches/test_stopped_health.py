"""Health checks of a server whose compression has stopped; tests/server/test_served_failures.py stops a real one."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager

import pytest
import requests
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from sglang_triattn.patches.observability import stopped

REASON = "Compression has stopped."
PATHS = ("/ready", "/health_generate", "/health", "/generate")


@pytest.fixture(params=["stopped", "compressing"])
def statuses(request, monkeypatch):
    """The status of each of PATHS, and whether they are those of a server whose compression has stopped."""
    monkeypatch.setattr(stopped, "_reasons", [REASON] if request.param == "stopped" else [])
    return dict(zip(PATHS, (503, 503, 200, 200) if request.param == "stopped" else (200,) * 4, strict=True))


def application() -> Starlette:
    routes = [Route(path, lambda _: Response()) for path in PATHS]
    return Starlette(routes=routes, middleware=[Middleware(stopped.HealthOfStopped)])


@contextmanager
def served(root_path: str):
    """The URL of the application as SGLang serves it."""
    server = uvicorn.Server(uvicorn.Config(application(), port=0, root_path=root_path, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.mark.parametrize("root_path", ["", "/x", "/x/y", "/ready"])
def test_a_proxy_that_strips_the_prefix(statuses, root_path):
    """Prevents a load balancer from sending requests to a server that has stopped to compress, where
    --fastapi-root-path makes uvicorn put a prefix in front of every path."""
    with served(root_path) as url:
        for path, status in statuses.items():
            assert requests.get(url + path, timeout=30).status_code == status, path
        if root_path:
            # SGLang has no answers for a proxy that leaves the prefix in place.
            assert requests.get(f"{url}{root_path}/ready", timeout=30).status_code == 404


@pytest.mark.parametrize("prefix", ["", "/x"])
def test_a_server_that_adds_no_prefix(statuses, prefix):
    """Prevents the same under an ASGI server that passes on the path as the proxy sent it, with its prefix or not."""
    client = TestClient(application(), root_path="/x")
    for path, status in statuses.items():
        assert client.get(prefix + path).status_code == status, path


def test_paths_that_only_look_like_the_prefix():
    """Prevents a path of another application from being cut."""
    for path in ("/xready", "/x", "/y/ready"):
        assert stopped.route_of({"path": path, "root_path": "/x"}) == path
