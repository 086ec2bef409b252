"""The packages depend on one another in one direction."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Folder -> prefixes that it must not import.
FORBIDDEN = {
    "kernels": ("sglang.", "sglang_triattn"),
    "sglang_triattn": ("sglang.", "triton", "sglang_triattn.patches"),
    "patches": ("triton",),
}
# The one command that starts the engine, and the one function that it may know of it.
ALLOWED = {"calibrate_command.py": "sglang_triattn.patches.calibration_launch.calibrate_with_engine"}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


@pytest.mark.parametrize("folder", FORBIDDEN)
def test_dependencies_point_one_way(folder):
    """Prevents the product's logic from needing SGLang or a GPU compiler, and kernels from needing the product."""
    files = sorted((ROOT / folder).glob("*.py"))
    assert files
    for path in files:
        own = "sglang_triattn.kernels" if folder == "kernels" else None
        for name in imports(path):
            if own and name.startswith(own):
                continue
            # `from a.b import c` is found as a.b and as a.b.c.
            if folder == "sglang_triattn" and ALLOWED.get(path.name, "").startswith(name):
                continue
            assert not (name + ".").startswith(FORBIDDEN[folder]), f"{path.name} imports {name}"


def test_files_stay_short():
    """Prevents files that a newcomer cannot read in one go."""
    for folder in ("kernels", "sglang_triattn", "patches", "tests", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 400, path
