"""SGLang's router in front of servers of the tests."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import requests

import server
from harness import Client, prompt

STARTS_S = 300
ROUNDS_S = 300
# Prompts after which all replicas have each had one, whatever the router goes by.
MOST_PREFIXES = 12
# A dead replica is noticed within a second, and a new one taken up as fast; a busy one may take its time to answer.
WATCHFUL = (
    *("--health-check-interval-secs", "1", "--health-check-timeout-secs", "30"),
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


def wait_for_rounds(replicas: Sequence[Client], rounds: int) -> None:
    """Waits until the replicas have had so many rounds in all."""
    deadline = time.monotonic() + ROUNDS_S
    while sum(replica.totals()["rounds"] for replica in replicas) < rounds:
        assert time.monotonic() < deadline, "no rounds"
        time.sleep(0.05)


def cached_behind_prefixes(router: Client, replicas: Sequence[Client], length: int) -> list[dict]:
    """Answers to prompts behind prefixes of this length that other prompts have brought to all replicas.

    Which replica gets a prompt that none knows is the router's choice; it spreads those that come at once.
    """
    before = [replica.totals()["rounds"] for replica in replicas]
    stems: list[list[int]] = []
    with ThreadPoolExecutor(len(replicas)) as pool:
        while any(replica.totals()["rounds"] == rounds for replica, rounds in zip(replicas, before, strict=True)):
            assert len(stems) < MOST_PREFIXES, "a replica gets no requests"
            new = [prompt(10 + len(stems) + n, length) for n in range(len(replicas))]
            list(pool.map(lambda ids: router.generate(ids, 110), new))
            stems += new
    return [router.generate([*stem, *prompt(30 + n, 10)], 110) for n, stem in enumerate(stems)]
