"""What the soak records of its server over time, and how it judges it."""

from __future__ import annotations

import re
import statistics
import threading
import time

import psutil
import requests

from benchmarks.serving.client import compression_of

GAUGES = {"kv_available": "kv_available_tokens", "kv_evictable": "kv_evictable_tokens"}
BLOCKS = 16
STUDENT_14 = 2.145
"""Two-sided 95 % quantile of Student's t with BLOCKS - 2 degrees of freedom."""


class Watch(threading.Thread):
    """Samples a server until it is ended, each sample a flat dict of numbers; the time is in seconds since `begun`."""

    def __init__(self, url: str, pid: int, begun: float, every_s: float) -> None:
        super().__init__(daemon=True)
        self._url, self._begun, self._every_s, self._ended = url, begun, every_s, threading.Event()
        self.processes = _family(pid)
        self.samples: list[dict[str, float]] = []
        self.failure: str | None = None

    def run(self) -> None:
        while not self._ended.wait(self._every_s):
            try:
                self.samples.append(self.sample())
            except (requests.RequestException, psutil.Error) as error:
                self.failure = f"the server does not answer: {error}"
                return

    def end(self) -> None:
        self._ended.set()
        self.join()

    def sample(self) -> dict[str, float]:
        found = {"seconds": round(time.monotonic() - self._begun, 2), **books(self._url)}
        for name, process in self.processes.items():
            found[f"{name} MB"] = round(process.memory_info().rss / 1e6, 3)
            found[f"{name} files"] = process.num_fds()
        return found


def _family(pid: int) -> dict[str, psutil.Process]:
    """The server's processes by what they are for, as SGLang titles all but the main one; untitled ones by number."""
    server = psutil.Process(pid)
    found = {"main": server}
    for number, child in enumerate(server.children(recursive=True), 1):
        title = " ".join(child.cmdline()).strip()
        if title.startswith("sglang::"):
            found[title.removeprefix("sglang::")] = child
        elif "resource_tracker" not in title:
            found[f"child {number}"] = child
    return found


def books(url: str) -> dict[str, float]:
    """The pool's books in tokens, requests, and sums of compaction, as the server itself states them."""
    (load,) = requests.get(f"{url}/v1/loads?include=core", timeout=60).json()["loads"]
    metrics = requests.get(f"{url}/metrics", timeout=60).text
    totals = compression_of(url)
    gauges = {name: _gauge(metrics, f"sglang:{metric}") for name, metric in GAUGES.items()}
    return {
        "running": load["num_running_reqs"],
        "waiting": load["num_waiting_reqs"],
        "used": load["num_used_tokens"],
        **gauges,
        "series": sum(not line.startswith("#") for line in metrics.splitlines()),
        **{key: totals[key] for key in ("rounds", "evicted_tokens", "freed_slots", "pressure_rounds")},
    }


def _gauge(metrics: str, name: str) -> float | None:
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", metrics, re.MULTILINE)
    return None if found is None else float(found[1])


def slope(seconds: list[float], values: list[float]) -> dict[str, float]:
    """The least-squares slope per hour, with its 95 % interval.

    Memory moves in steps that last for many samples, so the interval comes from the means of BLOCKS equal parts.
    """
    size = len(values) // BLOCKS
    times = [statistics.fmean(seconds[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    means = [statistics.fmean(values[i * size : (i + 1) * size]) for i in range(BLOCKS)]
    fit = statistics.linear_regression(times, means)
    residual = sum((mean - fit.intercept - fit.slope * at) ** 2 for at, mean in zip(times, means, strict=True))
    center = statistics.fmean(times)
    error = (residual / (BLOCKS - 2) / sum((at - center) ** 2 for at in times)) ** 0.5
    reach = STUDENT_14 * error
    return {key: 3600 * value for key, value in
            (("per_hour", fit.slope), ("low", fit.slope - reach), ("high", fit.slope + reach))}  # fmt: skip
