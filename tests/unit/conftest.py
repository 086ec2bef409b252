"""For all tests here: the command `sglang-triattn plan`, and what the quality benchmark is tried on."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from quality_cases import modules
from sglang_triattn.cli import main as cli
from tiny_models import COMMON, make_model


@pytest.fixture(scope="module")
def bench():
    """The quality benchmark's modules."""
    return modules()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Of a random model."""
    return make_model(tmp_path_factory.mktemp("quality") / "model", transformers.LlamaConfig(**COMMON))


@pytest.fixture(scope="module")
def model(folder):
    load = transformers.AutoModelForCausalLM.from_pretrained
    return load(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


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
