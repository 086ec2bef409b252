"""For all tests: their order, figures that a test measures for the reader, and files of other implementations."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """Runs slow tests first: neither of two test processes should be left with them when the other has finished."""
    items.sort(key=lambda item: item.path.parent.name != "slow")


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """Folder with published statistics and the reference implementation's scores; its README describes them."""
    return Path(__file__).parent / "golden"


def pytest_terminal_summary(terminalreporter):
    """Shows figures at the end, including those of parallel processes."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "figures" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")
