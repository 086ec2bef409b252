"""The `sglang-triattn` command: what users see."""

import subprocess
import sys

import pytest
import transformers
from tiny_models import COMMON, make_model, make_text

from sglang_triattn import cli
from sglang_triattn.stats import load_stats


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A working directory with a model and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON))
    make_text(tmp_path / "text", 400)
    return tmp_path


def run(*options: str) -> int:
    return cli.main(["calibrate", "--device", "cpu", *options])


def test_calibrate_writes_the_file(ready, capsys):
    """Prevents options from being lost between the command line and calibration."""
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors", "--max-tokens", "300") == 0
    stats = load_stats("s.safetensors")
    assert stats.token_count == 300
    assert stats.mean.shape == (2, 6, 4)
    assert capsys.readouterr().out == "wrote s.safetensors: 2 layers of 6 query heads, 300 tokens\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--out": "s.pt"}, "--out is s.pt, but its name must end in .safetensors."),
        ({"--out": "none/s.safetensors"}, "but its folder does not exist: create it first."),
        ({"--data": "none"}, "Calibration text none cannot be read (No such file or directory)"),
        ({"--model": "no/such-model"}, "Model no/such-model cannot be loaded"),
    ],
    ids=str,
)
def test_mistakes_give_one_sentence_and_status_2(ready, capsys, options, message):
    """Prevents tracebacks for a user's mistake, and files written in spite of it."""
    before = set(ready.iterdir())
    given = {"--model": "model", "--data": "text", "--out": "s.safetensors"} | options
    assert run(*[word for pair in given.items() for word in pair]) == 2
    error = capsys.readouterr().err
    assert error.startswith("sglang-triattn: ")
    assert message in error
    assert error.count("\n") == 1
    assert set(ready.iterdir()) == before


def test_interruption_leaves_no_file(ready, capsys, monkeypatch):
    """Prevents a half-written file, or a traceback, after Ctrl-C."""

    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_triattn.query_sums.unrotate", interrupt)
    before = set(ready.iterdir())
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors") == 130
    assert capsys.readouterr().err.endswith("sglang-triattn: interrupted, no file was written\n")
    assert set(ready.iterdir()) == before


def test_running_out_of_memory_is_explained(ready, capsys, monkeypatch):
    """Prevents CUDA's page of text for the most likely failure on a small GPU."""
    import torch

    def exhaust(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr("sglang_triattn.query_sums.unrotate", exhaust)
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors") == 2
    assert "ran out of memory: use a smaller --window" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_transformers():
    """Prevents a help text that takes seconds to appear."""
    code = (
        "import sys; from sglang_triattn import cli\n"
        "try: cli.main(['calibrate', '--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--max-tokens" in result.stdout


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["calibrate"], ["calibrate", "--max-tokens", "many"]])
def test_wrong_arguments_exit_with_status_2(arguments, capsys):
    """Prevents a subcommand from starting with arguments it did not get."""
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert "usage: sglang-triattn" in capsys.readouterr().err
