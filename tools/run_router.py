"""Start and stop SGLang's router in front of servers, for the server tests and the benchmarks."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

import server

STARTS_S = 300
# A dead server is noticed within a second, and a new one taken up as fast; a busy one may take its time to answer.
WATCHFUL = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "30"),
    *("--health-failure-threshold", "1", "--health-success-threshold", "1"),
    *("--cb-timeout-duration-secs", "1", "--worker-startup-check-interval", "1"),
)
# A prompt that no server knows goes to the one that has least to do.
SPREAD = ("--policy", "cache_aware", "--balance-abs-threshold", "0", "--balance-rel-threshold", "1")


@contextmanager
def running_router(
    urls: Sequence[str], log_path: Path, *args: str, servers: Sequence[str] = ()
) -> Iterator[server.Server]:
    """A router that has taken up all of `urls`.

    Args:
        args: added to its command line; they name the servers with `--pd-disaggregation`.
        servers: the servers at `urls`, if the router is to find the latter itself.
    """
    port = server.free_port()
    command = router_command(urls, port, *args, servers=servers)
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder, log_path.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
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


def router_command(urls: Sequence[str], port: int, *args: str, servers: Sequence[str] = ()) -> list[str]:
    """The words after `python -m` that start a router at `port`; for the rest see `running_router`."""
    command = ["sglang_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(server.free_port())]
    if "--pd-disaggregation" not in args:
        command += ["--worker-urls", *(servers or urls)]
    return [*command, *WATCHFUL, *args]


def healthy_workers(router: server.Server) -> set[str]:
    """URLs of the servers to which the router sends requests."""
    workers = requests.get(router.url + "/workers", timeout=10).json()["workers"]
    return {worker["url"] for worker in workers if worker["is_healthy"]}


def wait_for_workers(router: server.Server, urls: Sequence[str]) -> None:
    """Waits until the router sends requests to exactly these servers.

    Raises:
        server.ServerError: it does not, or has ended; the message has the end of its log.
    """
    deadline = time.monotonic() + STARTS_S
    while True:
        try:
            if healthy_workers(router) == set(urls):
                return
        except requests.RequestException as error:
            if router.process.poll() is not None:
                raise server.ServerError(f"{router.log_tail()}\nthe router ended") from error
        if time.monotonic() > deadline:
            raise server.ServerError(f"{router.log_tail()}\nthe router has not taken up {', '.join(urls)}")
        time.sleep(0.1)
