"""A Prometheus that scrapes servers as monitoring/prometheus.yaml says, and what the dashboard asks of it.

Where Prometheus is not installed, it comes from Debian's package, which is unpacked into the cache and not installed.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from env import ROOT, cache_root, exclusive_lock, fail
from server import ServerError, free_port, running_process

CONFIG = ROOT / "monitoring" / "prometheus.yaml"
DASHBOARD = ROOT / "monitoring" / "grafana" / "dashboards" / "json" / "triattention.json"
START_TIMEOUT_S = 60


def can_prepare() -> bool:
    """Whether Prometheus is installed, or this system has Debian's packages."""
    return shutil.which("prometheus") is not None or bool(shutil.which("apt-get") and shutil.which("dpkg"))


def prepare() -> Path:
    """The Prometheus binary; unpacks what is missing. Ends the program with one sentence if that fails."""
    installed = shutil.which("prometheus")
    if installed is not None:
        return Path(installed)
    if not can_prepare():
        fail("there is no `prometheus` on the PATH, and no apt-get to take it from Debian: install it.")
    target = cache_root() / "prometheus"
    with exclusive_lock(target.with_suffix(".lock")):
        if not target.exists():
            print(f"preparing {target}: once, a download of 20 MB", file=sys.stderr)
            with tempfile.TemporaryDirectory(prefix=".unfinished-", dir=target.parent) as folder:
                _unpack(Path(folder))
                (Path(folder) / "unpacked" / "usr" / "bin").rename(target)
    return target / "prometheus"


def _unpack(folder: Path) -> None:
    # Lists of its own, so that neither root nor an earlier `apt-get update` is needed.
    for name in ("lists/partial", "archives/partial", "unpacked"):
        (folder / name).mkdir(parents=True)
    own = [f"-oDir::State::lists={folder / 'lists'}", f"-oDir::Cache={folder}", "-oAPT::Sandbox::User="]
    for command in (["update"], ["download", "prometheus"]):
        done = subprocess.run(["apt-get", "-q", *own, *command], cwd=folder, stdout=sys.stderr)
        if done.returncode != 0:
            fail(f"`apt-get {' '.join(command)}` failed (its messages are above): install prometheus.")
    (package,) = folder.glob("prometheus_*.deb")
    if subprocess.run(["dpkg", "-x", package, folder / "unpacked"], stdout=sys.stderr).returncode != 0:
        fail(f"`dpkg -x {package.name}` failed (its messages are above): install prometheus.")


@dataclass(frozen=True)
class Prometheus:
    """A running Prometheus."""

    url: str

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression now. Raises urllib.error.HTTPError if Prometheus refuses it."""
        return self._ask("query", query=expression)

    def query_range(self, expression: str, start: float, end: float, step: float) -> list[dict[str, Any]]:
        """The series of an expression from `start` to `end` (seconds of the epoch), one value every `step` seconds."""
        return self._ask("query_range", query=expression, start=start, end=end, step=step)

    def _ask(self, path: str, **parameters: object) -> list[dict[str, Any]]:
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=60) as response:
            return json.load(response)["data"]["result"]

    def is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5) as response:
                return response.status == 200
        except OSError:
            return False


@contextmanager
def running_prometheus(targets: Sequence[str], scrape_interval: str, log: Path) -> Iterator[Prometheus]:
    """A Prometheus with the repository's configuration, but for the targets (host:port) and the interval."""
    config = yaml.safe_load(CONFIG.read_text())
    config["global"]["scrape_interval"] = scrape_interval
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": list(targets)}]
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder:
        file = Path(folder) / "prometheus.yaml"
        file.write_text(yaml.safe_dump(config))
        command = [str(prepare()), f"--config.file={file}", f"--storage.tsdb.path={folder}/data"]
        command.append(f"--web.listen-address=127.0.0.1:{port}")
        with running_process(command, port, log_path=log) as process:
            found, deadline = Prometheus(process.url), time.monotonic() + START_TIMEOUT_S
            while not found.is_ready():
                if process.process.poll() is not None or time.monotonic() > deadline:
                    raise ServerError(f"{process.log_tail()}\nPrometheus did not start; its last lines are above.")
                time.sleep(0.05)
            yield found


def panels() -> list[dict[str, Any]]:
    """The panels of the dashboard."""
    return json.loads(DASHBOARD.read_text())["panels"]


def filled(expression: str, window: str) -> str:
    """An expression of the dashboard as Grafana sends it, for all models and servers; rates are taken over `window`."""
    for name, value in (("$__rate_interval", window), ("$model_name", ".*"), ("$instance", ".*")):
        expression = expression.replace(name, value)
    return expression
