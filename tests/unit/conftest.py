"""Files that several unit tests read."""

import os
from pathlib import Path

import pytest

REFERENCE_FILES = Path(__file__).parents[3] / "shared" / "golden"


@pytest.fixture(scope="session")
def reference_files() -> Path:
    """Folder with the published statistics and the reference implementation's scores, kept beside the checkout."""
    if not REFERENCE_FILES.is_dir() and not os.environ.get("CI"):
        pytest.skip("the published statistics and reference scores are not beside this checkout")
    return REFERENCE_FILES
