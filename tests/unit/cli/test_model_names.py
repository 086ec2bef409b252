"""Model names from the local Hugging Face cache, which `check`, `plan` and `doctor` all take."""

import json
import shutil

import pytest

from plan_cases import CONFIGS, QWEN3_32B
from sglang_triattn.cli import main as cli
from sglang_triattn.doctor import statistics

NAME = "Qwen/Qwen3-32B"


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A local cache that holds the config.json of one model."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "own"))
    repository = tmp_path / "models--Qwen--Qwen3-32B"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    snapshot = repository / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    shutil.copy(QWEN3_32B, snapshot / "config.json")


def test_a_name_stands_for_its_config(cached, run_check, capsys):
    """Prevents users from having to look for a file that SGLang finds by the model's name."""
    status, output, error = run_check(NAME, "--json")
    assert (status, error) == (0, "")
    verdict = json.loads(output)
    assert (verdict["compressed"], verdict["model"]) == (True, f"{NAME} (Qwen3ForCausalLM)")
    assert cli.main(["plan", "--model", NAME, "--memory", "80G"]) == 0
    assert "qwen3, 64 layers" in capsys.readouterr().out
    check, _ = statistics.model_rows(NAME)
    assert (check.status, "64 full" in check.found) == ("ok", True)


@pytest.mark.parametrize("command", [["check"], ["plan", "--memory", "80G"], ["doctor"]], ids=lambda words: words[0])
def test_a_name_that_is_nowhere(cached, command, capsys):
    """Prevents a traceback, or a download, for a name that the cache does not hold."""
    assert cli.main([*command, "--model", "Qwen/Qwen3-1B"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Qwen/Qwen3-1B cannot be read" in error
    assert error.endswith("or the name of a model in the local cache of Hugging Face.\n")


def test_a_path_comes_first(cached, tmp_path, monkeypatch, run_check):
    """Prevents a folder of the user's from being passed over for a model of the same name."""
    folder = tmp_path / NAME
    folder.mkdir(parents=True)
    shutil.copy(CONFIGS / "llama-3.3-70b.json", folder / "config.json")
    monkeypatch.chdir(tmp_path)
    assert "80 full" in run_check(NAME)[1]
