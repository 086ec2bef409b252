"""For all tests: figures that a test measures for the reader, and files of other implementations."""

import os
from pathlib import Path

import pytest

REFERENCE_FILES = Path(__file__).parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """Folder with the published statistics and the reference implementation's scores, kept beside the checkout."""
    if not REFERENCE_FILES.is_dir() and not os.environ.get("CI"):
        pytest.skip("the published statistics and reference scores are not beside this checkout")
    return REFERENCE_FILES


def pytest_terminal_summary(terminalreporter):
    """Figures are shown at the end, also those of parallel processes."""
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, value in getattr(report, "user_properties", ()):
                if name == "figures" and report.when == "call":
                    terminalreporter.write_line(f"{report.nodeid}: {value}")
