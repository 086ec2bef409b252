"""SGLang's router in front of servers of the tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import requests

import server

STARTS_S = 60
# A dead replica is noticed within a second, and a new one taken up as fast.
WATCHFUL = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "1"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "1", "--worker-startup-check-interval", "1"),
)


@contextmanager
def running_router(urls: list[str], log_path: Path, *args: str) -> Iterator[server.Server]:
    """A router that has taken up the servers at `urls`; `args` are added to its command line, and name the servers
    with `--pd-disaggregation`."""
    port = server.free_port()
    command = [sys.executable, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(server.free_port())]
    if "--pd-disaggregation" not in args:
        command += ["--worker-urls", *urls]
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder, log_path.open("w") as log:
        process = subprocess.Popen(
            [*command, *WATCHFUL, *args],
            cwd=folder,
            env=server.environment({}),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        running = server.Server(process, port, log_path)
        try:
            wait_for_workers(running, urls)
            yield running
        finally:
            server.stop_process(process, grace_s=0)


def healthy_workers(router: server.Server) -> set[str]:
    """URLs of the servers to which the router sends requests."""
    workers = requests.get(router.url + "/workers", timeout=10).json()["workers"]
    return {worker["url"] for worker in workers if worker["is_healthy"]}


def wait_for_workers(router: server.Server, urls: list[str]) -> None:
    """Waits until the router sends requests to exactly these servers."""
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            if healthy_workers(router) == set(urls):
                return
        except requests.RequestException:
            assert router.process.poll() is None, router.log_tail()
        assert time.monotonic() < deadline, router.log_tail()
        time.sleep(0.1)
