"""For all unit tests: the command `sglang-triattn plan` and the quality benchmark's modules."""

import json
from pathlib import Path

import pytest

from quality_cases import modules
from random_model import folder, model
from sglang_triattn.cli import main as cli

__all__ = ["bench", "folder", "model", "run_plan"]


@pytest.fixture(scope="module")
def bench():
    """The quality benchmark's modules."""
    return modules()


@pytest.fixture
def run_plan(tmp_path, monkeypatch, capsys):
    """Plans a config (a dict, saved as the file `model`); returns status, output and error output."""
    monkeypatch.chdir(tmp_path)

    def run(config: object, *options: str) -> tuple[int, str, str]:
        Path("model").write_text(json.dumps(config))
        status = cli.main(
            ["plan", "--model", "model", *(options if "--memory" in options else ("--memory", "24G", *options))]
        )
        return status, *capsys.readouterr()

    return run
