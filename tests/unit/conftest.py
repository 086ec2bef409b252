"""For all unit tests: the commands `sglang-triattn plan` and `check`."""

import json
from pathlib import Path

import pytest

from plan_cases import CONFIGS
from random_model import folder, model
from sglang_triattn.cli import main as cli

__all__ = ["folder", "model", "run_check", "run_plan"]


@pytest.fixture
def run_plan(tmp_path, monkeypatch, capsys):
    """Plans a config (a dict, saved as the file `model`), for 24 GiB by default; returns status and both outputs."""
    monkeypatch.chdir(tmp_path)

    def run(config: object, *options: str) -> tuple[int, str, str]:
        Path("model").write_text(json.dumps(config))
        memory = () if {"--memory", "--gpu"} & set(options) else ("--memory", "24G")
        status = cli.main(["plan", "--model", "model", *memory, *options])
        return status, *capsys.readouterr()

    return run


@pytest.fixture
def run_check(capsys):
    """Checks a model of tests/support/configs, or any other path; returns status, output and error output."""

    def run(model: str, *options: str) -> tuple[int, str, str]:
        file = CONFIGS / f"{model}.json"
        status = cli.main(["check", "--model", str(file) if file.exists() else model, *options])
        return status, *capsys.readouterr()

    return run
