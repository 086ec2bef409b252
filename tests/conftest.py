"""For all tests: their order, what they cost, figures that a test measures for the reader, and files of other
implementations."""

import time
from collections import Counter
from pathlib import Path

import pytest

import costs
from sets import PARTS, part_of

METER = costs.Meter()
TOTAL: dict[str, costs.Cost] = {}
STARTED = time.perf_counter()


def pytest_addoption(parser):
    parser.addoption("--costs", type=Path, help="write what each file of tests cost to this file")
    parser.addoption("--part", type=int, choices=range(PARTS), help="run a sixth of the chosen tests")
    parser.addoption("--kernels", default="", help="what `make kernels` found, for the summary")


def file_of(item) -> str:
    """The test's file, as seen from the checkout."""
    return item.nodeid.partition("::")[0]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config, items):
    """Takes the part that was asked for, once markers have chosen, and runs the longest files first.

    So no test process is left with a long file when the other has finished. A file takes as long as its chosen tests,
    each of which takes the file's known average; without one, it counts as one of the longest.
    """
    part = config.getoption("part")
    if part is not None:
        chosen = part_of(items, part)
        config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
        items[:] = chosen
    counts, seconds = Counter(map(file_of, items)), costs.known_seconds()
    items.sort(key=lambda item: -counts[file_of(item)] * seconds.get(file_of(item), float("inf")))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    METER.begin()
    result = yield
    METER.end(file_of(item), last=nextitem is None or file_of(nextitem) != file_of(item))
    return result


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["costs"] = {file: vars(cost) for file, cost in METER.costs.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    costs.merge(TOTAL, getattr(node, "workeroutput", {}).get("costs", {}))


def pytest_configure(config):
    # A process of pytest-xdist shows nothing itself: the one that the user started does.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(config), "failures-at-once")


class Failures:
    """Shows each failure's message when it happens: pytest shows them at its end, which a stopped run never has."""

    def __init__(self, config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"{report.nodeid} failed at its {report.when}:\n{report.longreprtext}")


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """Folder with published statistics and the reference implementation's scores; its README describes them."""
    return Path(__file__).parent / "golden"


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Shows figures at the end, including those of parallel processes, and what the run cost."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "figures" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")
    found, seconds = TOTAL or METER.costs, time.perf_counter() - STARTED
    terminalreporter.write_line(costs.summary(found, seconds, config.getoption("kernels")))
    path = config.getoption("costs")
    if path:
        costs.write(path, found, seconds)
