"""Benchmarks run by the commands that the documents name."""

import re
import runpy
import sys

import pytest

from checkout import ROOT
from documents import documents

COMMAND = re.compile(r"-m (benchmarks\.[a-z_.]*[a-z])")
MAIN = re.compile(r'^if __name__ == "__main__":\n(?:    .*\n)?    main\(\)$', re.MULTILINE)


def commands() -> set[str]:
    """Every benchmark by the name that `python -m` takes."""
    files = [path for path in (ROOT / "benchmarks").rglob("*.py") if MAIN.search(path.read_text())]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__") for path in files}


def test_documents_name_benchmarks_that_run():
    """Prevents commands of benchmarks that were moved, in documents and in the benchmarks' own words."""
    files = [*documents(), ROOT / "Makefile", *(ROOT / "benchmarks").rglob("*.py")]
    named = {name for file in files for name in COMMAND.findall(file.read_text())}
    assert named <= commands()


def test_the_benchmarks_readme_names_every_benchmark():
    """Prevents a benchmark that no reader finds."""
    assert commands() <= set(COMMAND.findall((ROOT / "benchmarks" / "README.md").read_text()))


@pytest.mark.parametrize(
    "name",
    [
        "benchmarks.conformance",
        "benchmarks.decode",
        "benchmarks.quality",
        "benchmarks.quality.solve",
        "benchmarks.quality.streams",
    ],
)
def test_packages_run(name, monkeypatch, capsys):
    """Prevents a package whose command is not the one that its help shows."""
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: python -m {name} ")
