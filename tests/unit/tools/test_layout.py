"""The packages depend on one another in one direction."""

import ast
import graphlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from checkout import ROOT
from import_graph import Checkout

# Folder -> prefixes that it must not import.
FORBIDDEN = {
    "kernels": ("sglang.", "sglang_triattn"),
    "sglang_triattn": ("sglang.", "triton", "sglang_triattn.patches"),
    "patches": ("triton",),
}
# Commands that look at SGLang, or start its engine, and the only functions that they may use.
ALLOWED = {
    "cli/calibrate.py": ("sglang_triattn.patches.calibration.engine.calibrate_with_engine",),
    "cli/doctor.py": (
        "sglang_triattn.patches.doctor.upstream_check.hook_rows",
        "sglang_triattn.patches.doctor.upstream_check.use_rows",
    ),
}
# Folders and files of patches/, each of which imports from those below it alone, and folders from their own files.
ROOMS = (
    *("doctor", "plugin", "worker_app", "compression", "grpc_servicer", "request_validation", "request_names"),
    *("observability", "rounds", "scheduler", "calibration", "request", "model", "launch", "ranks", "cpu", "hooks"),
    "sglang_types",
)


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
    files = sorted((ROOT / folder).rglob("*.py"))
    assert len({path.parent for path in files}) > 1, "the rooms are looked into"
    for path in files:
        own = "sglang_triattn.kernels" if folder == "kernels" else None
        for name in imports(path):
            if own and name.startswith(own):
                continue
            # `from a.b import c` is found as a.b and as a.b.c.
            if any(allowed.startswith(name) for allowed in ALLOWED.get(str(path.relative_to(ROOT / folder)), ())):
                continue
            assert not (name + ".").startswith(FORBIDDEN[folder]), f"{path.name} imports {name}"


@pytest.fixture(scope="module")
def needs() -> dict[str, set[str]]:
    """The modules that each module of the product imports, also in functions and for the type checker alone."""
    checkout = Checkout(ROOT)
    modules = {name: file for name, file in checkout.modules.items() if file in checkout.product}
    found = {}
    for name, file in modules.items():
        found[name] = set()
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names} & set(modules)
            elif isinstance(node, ast.ImportFrom):
                full = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {each if each in modules else node.module for each in full} & set(modules)
    return found


def test_rooms_need_only_those_below(needs):
    """Prevents a change in one room of patches/ from reaching rooms that know nothing of it."""
    prefix = "sglang_triattn.patches."
    room = {name: name.removeprefix(prefix).split(".")[0] for name in needs if name.startswith(prefix)}
    assert set(room.values()) == set(ROOMS)
    up = [
        f"{name} imports {other}"
        for name in room
        for other in sorted(needs[name] & set(room))
        if ROOMS.index(room[other]) < ROOMS.index(room[name])
    ]
    assert up == []


def test_no_two_files_need_each_other(needs):
    """Prevents files that can be read, tested and changed only together."""
    assert sum(map(len, needs.values())) > 500, "imports are seen"
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_files_stay_short():
    """Prevents files that a newcomer cannot read in one go."""
    for folder in ("kernels", "sglang_triattn", "patches", "tests", "benchmarks", "tools"):
        for path in (ROOT / folder).rglob("*.py"):
            assert len(path.read_text().splitlines()) <= 500, path


def test_no_two_test_files_share_a_name():
    """Prevents files that pytest runs alone but not together: it imports each by its name without folders."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_no_two_modules_share_a_name():
    """Prevents a test that imports another folder's module, depending on which was imported first."""
    folders = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]["pythonpath"]
    names = [path.stem for folder in folders for path in (ROOT / folder).glob("*.py") if path.stem != "conftest"]
    assert sorted(names) == sorted(set(names))


def test_tests_read_nothing_outside_the_checkout():
    """Prevents tests that fail, or are skipped, in a clone with nothing next to it."""
    for path in (ROOT / "tests").rglob("*.py"):
        depth = len(path.relative_to(ROOT).parts) - 1
        for number in re.findall(r"parents\[(\d+)\]", path.read_text()):
            assert int(number) <= depth, f"{path} looks outside the checkout"


def test_gpu_tests_need_no_sglang():
    """Prevents kernel tests that run only where all of SGLang is installed."""
    pytest.importorskip("triton", reason="Triton has no wheel for this platform")
    allowed = {"checkout", "flashinfer", "numpy", "pytest", "sets", "torch", "triton"} | sys.stdlib_module_names
    files = list((ROOT / "tests" / "gpu").glob("*.py"))
    own = {path.stem for path in files}
    for path in files:
        for name in imports(path):
            kernels = (name + ".").startswith(("sglang_triattn.kernels.", "benchmarks.decode."))
            assert kernels or name.partition(".")[0] in allowed | own, f"{path.name} imports {name}"


def test_a_checkout_that_is_not_installed():
    """Prevents the kernels' tests and benchmarks from needing an installer.

    Without site-packages nothing is installed, not even this package.
    """
    code = f"import sys; sys.path.append({str(ROOT / 'tools')!r}); import checkout; checkout.make_importable(); "
    code += "import sglang_triattn.kernels, sglang_triattn.rounds.plan; print(*sglang_triattn.kernels.__path__)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd="/", capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(ROOT / "sglang_triattn" / "kernels"), done.stderr
