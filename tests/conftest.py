"""For all tests: their order, figures that a test measures for the reader, and files of other implementations."""

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items):
    """What takes minutes comes first: neither of two test processes should be left with it when the other has ended."""
    items.sort(key=lambda item: item.path.parent.name != "slow")


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """Folder with published statistics and the reference implementation's scores; its README says what they are."""
    return Path(__file__).parent / "golden"


def pytest_terminal_summary(terminalreporter):
    """Figures are shown at the end, also those of parallel processes."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "figures" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")
