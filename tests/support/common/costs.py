"""What each file of tests costs: wall seconds and CPU seconds, servers included, and the order that follows from it."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
KNOWN = ROOT / "tests" / "costs.json"
"""What every file cost when `COMMAND` last wrote it."""

COMMAND = "make test ARGS='--costs tests/costs.json'"


@dataclass
class Cost:
    """
    Attributes:
        tests: how many ran.
        wall_s: seconds from the start of the first test to the end of the last one.
        cpu_s: seconds of user and system time of the test process, its servers and all else that it started.
    """

    tests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0


def cpu_seconds() -> float:
    """CPU seconds of this process and of all that it started, ended processes included once they are reaped."""
    try:
        import psutil
    except ImportError:
        # A machine for kernels alone, where no test starts a server.
        return sum(os.times()[:4])
    total = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            total += sum(process.cpu_times()[:4])
        except psutil.NoSuchProcess:
            continue
    return total


class Meter:
    """Measures one file at a time; a process runs the tests of a file one after another."""

    def __init__(self) -> None:
        self.costs: dict[str, Cost] = {}
        self._begun: tuple[float, float] | None = None

    def begin(self) -> None:
        """Starts measuring a file unless one is being measured."""
        if self._begun is None:
            self._begun = time.perf_counter(), cpu_seconds()

    def end(self, file: str, last: bool) -> None:
        """Counts a test of `file`; adds up its seconds after the last one."""
        cost = self.costs.setdefault(file, Cost())
        cost.tests += 1
        if last and self._begun is not None:
            wall, cpu = self._begun
            cost.wall_s += time.perf_counter() - wall
            cost.cpu_s += cpu_seconds() - cpu
            self._begun = None


def merge(total: dict[str, Cost], more: dict[str, dict]) -> None:
    """Adds the costs of another process, as `vars` of each Cost."""
    for file, cost in more.items():
        mine = total.setdefault(file, Cost())
        mine.tests += cost["tests"]
        mine.wall_s += cost["wall_s"]
        mine.cpu_s += cost["cpu_s"]


def known_seconds() -> dict[str, float]:
    """Wall seconds of a test of each file, on average, when the table was written."""
    if not KNOWN.exists():
        return {}
    return {file: cost["wall_s"] / cost["tests"] for file, cost in json.loads(KNOWN.read_text())["files"].items()}


def summary(costs: dict[str, Cost], seconds: float, kernels: str) -> str:
    """One line: tests, seconds, the five slowest files, and what `make kernels` found, if it came first."""
    slowest = sorted(costs.items(), key=lambda row: -row[1].wall_s)[:5]
    parts = [
        f"{sum(cost.tests for cost in costs.values()):,} tests in {seconds:.0f} s",
        "slowest: " + ", ".join(f"{file} {cost.wall_s:.0f} s" for file, cost in slowest),
        *([f"kernels: {kernels}"] if kernels else []),
    ]
    return "; ".join(parts)


def write(path: Path, costs: dict[str, Cost], seconds: float) -> None:
    """Writes the table, longest file first, with the load of the machine."""
    rows = sorted(costs.items(), key=lambda row: -row[1].wall_s)
    table = {
        "command": COMMAND,
        "cores": os.cpu_count(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "wall_s": round(seconds),
        "cpu_s": round(sum(cost.cpu_s for cost in costs.values())),
        "tests": sum(cost.tests for cost in costs.values()),
        "files": {
            file: {"tests": cost.tests, "wall_s": round(cost.wall_s, 1), "cpu_s": round(cost.cpu_s, 1)}
            for file, cost in rows
        },
    }
    path.write_text(json.dumps(table, indent=1) + "\n")
