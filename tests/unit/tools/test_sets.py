"""The two sets of tests: `make test` and, with those marked wide, `make test-all`; and what each file of them costs."""

import ast
import itertools
import re
import subprocess
import sys

import pytest

import costs
from checkout import ROOT
from sets import PARTS, part_of


def has_tests(path) -> bool:
    """Whether pytest finds tests in this file once it is asked to look."""
    return any(
        (isinstance(node, ast.FunctionDef) and node.name.startswith("test"))
        or (isinstance(node, ast.ClassDef) and node.name.startswith("Test"))
        for node in ast.parse(path.read_text()).body
    )


def recipes() -> str:
    return (ROOT / "Makefile").read_text()


def test_every_file_of_tests_is_run():
    """Prevents a file of tests that no set runs: of another name, in another folder, or ignored by an option."""
    tracked = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in tracked.stdout.split()]
    collected = [path for path in files if path.is_relative_to(ROOT / "tests") and path.name.startswith("test_")]
    assert len({path.name for path in collected}) == len(collected)
    # Run by a recipe of its own, or by a test in a process of its own.
    named = recipes() + "".join(path.read_text() for path in collected)
    for path in files:
        if has_tests(path) and path not in collected:
            assert f"{path.relative_to(ROOT)}" in named, f"nothing runs {path}"
    # What a collection skips: kernel tests, which others run interpreted, and nothing else.
    skipping = [path for path in (ROOT / "tests").rglob("conftest.py") if "collect_ignore" in path.read_text()]
    assert skipping == [ROOT / "tests" / "gpu" / "conftest.py"]
    assert 'assert_pass_interpreted("tests/gpu"' in (ROOT / "tests/slow/test_interpreted.py").read_text()


def test_the_sets_are_chosen_by_the_marker_alone():
    """Prevents tests that one of the sets leaves out by their names."""
    recipe = dict(re.findall(r"^([a-z-]+):[^\n]*##[^\n]*\n\t@(.*)$", recipes(), re.MULTILINE))
    assert recipe["test"] == '$(TEST) -m "not wide" $(ARGS)'
    assert recipe["test-all"] == "$(TEST) $(ARGS)"
    part = "$(if $(PART),--part $(PART))"
    kernels = f'"$$py" tools/compile_kernels.py {part}'
    assert recipe["test-wide"] == f"$(ENV) && {kernels} && $(PYTEST) -m wide {part} $(ARGS)"
    common = re.search(r"^PYTEST = .*\n(?:#.*\n)*TEST = (?:.*\\\n)*.*$", recipes(), re.MULTILINE)
    assert common
    assert not re.search(r"--ignore|--deselect| -k |-m (?!pytest)", common[0])


@pytest.mark.parametrize("number", [0, 1, 7, 102])
def test_the_parts_are_the_whole(number):
    """Prevents a wide test that no commit's part holds."""
    parts = [part_of(list(range(number)), part) for part in range(PARTS)]
    assert sorted(itertools.chain(*parts)) == list(range(number))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    # Not imported, because Triton is not to be had everywhere.
    assert f"\nPARTS = {PARTS}\n" in (ROOT / "tools" / "compile_kernels.py").read_text()


def test_costs_are_those_of_files_that_exist():
    """Prevents an order of files by the costs of files that are gone."""
    missing = [file for file in costs.known_seconds() if not (ROOT / file).exists()]
    assert costs.known_seconds()
    assert not missing, f"write them anew: {costs.COMMAND}"


def test_a_file_costs_what_its_servers_cost():
    """Prevents costs of the test process alone, and those of one file counted to the next."""
    spend = "import time\nwhile time.process_time() < 0.3: pass"
    meter = costs.Meter()
    meter.begin()
    subprocess.run([sys.executable, "-c", spend], check=True)
    meter.end("tests/a.py", last=False)
    meter.begin()
    meter.end("tests/a.py", last=True)
    meter.begin()
    meter.end("tests/b.py", last=True)
    first, second = meter.costs["tests/a.py"], meter.costs["tests/b.py"]
    assert (first.tests, second.tests) == (2, 1)
    # Differences of the clock of child processes, which counts in hundredths of a second, are a little off.
    assert round(min(first.cpu_s, first.wall_s), 6) >= 0.29
    assert second.wall_s < first.wall_s
    total: dict[str, costs.Cost] = {}
    for _ in range(2):
        costs.merge(total, {file: vars(cost) for file, cost in meter.costs.items()})
    assert total["tests/a.py"].tests == 4
    line = costs.summary(total, 9.6, "3 combinations")
    assert line.startswith("6 tests in 10 s; slowest: tests/a.py")
    assert line.endswith("tests/b.py 0 s; kernels: 3 combinations")
