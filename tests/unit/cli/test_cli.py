"""The `sglang-triattn` command: what users see."""

import re
import subprocess
import sys

import pytest
import torch
import transformers

from plan_cases import QWEN3_32B
from sglang_triattn import __version__
from sglang_triattn.cli import main as cli
from sglang_triattn.stats.file import load_stats
from tiny_models import COMMON, make_model, make_text


@pytest.fixture
def ready(tmp_path, monkeypatch):
    """A working directory with a model and a text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    make_model(tmp_path / "model", transformers.LlamaConfig(**COMMON))
    make_text(tmp_path / "text", 400)
    (tmp_path / "chats.jsonl").write_text('[{"role": "user", "content": "w1"}]')
    return tmp_path


def test_something_to_calibrate_on_is_needed(ready, capsys):
    """Prevents a statistics file computed from nothing."""
    assert run("--model", "model", "--out", "s.safetensors") == 2
    assert "give --data FILE, or --self N with --engine sglang" in capsys.readouterr().err


def run(*options: str) -> int:
    return cli.main(["calibrate", "--device", "cpu", *options])


def test_calibrate_writes_the_file(ready, capsys):
    """Prevents options from being lost between the command line and calibration."""
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors", "--max-tokens", "300") == 0
    stats = load_stats("s.safetensors")
    assert stats.token_count == 300
    assert stats.mean.shape == (2, 6, 4)
    wrote, title, layers, predicted = capsys.readouterr().out.splitlines()
    assert wrote == "wrote s.safetensors: 2 layers of 6 query heads, 300 tokens"
    assert title == "concentration of the queries"
    assert re.fullmatch(r"  layers 0-1    0\.\d\d 0\.\d\d", layers)
    assert predicted.startswith("  it predicts   ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"--out": "s.pt"}, "--out is s.pt, but its name must end in .safetensors."),
        ({"--out": "none/s.safetensors"}, "but its folder does not exist: create it first."),
        ({"--data": "none"}, "Calibration text none cannot be read (No such file or directory)"),
        ({"--self": "2"}, "--self needs --engine sglang"),
        ({"--": "--tp=2"}, "Arguments after -- (--tp=2) are for --engine sglang"),
        ({"--data": "chats.jsonl"}, "The model has no chat template"),
        ({"--engine": "sglang", "--self": "-1"}, "-1 traces of 2048 tokens mean nothing"),
        ({"--model": "no/such-model"}, "Model no/such-model cannot be loaded"),
    ],
    ids=str,
)
def test_mistakes_give_one_sentence_and_status_2(ready, capsys, options, message):
    """Prevents tracebacks for a user's mistake, and files written despite it."""
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

    monkeypatch.setattr("sglang_triattn.calibration.query_sums.unrotate", interrupt)
    before = set(ready.iterdir())
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors") == 130
    assert capsys.readouterr().err.endswith("sglang-triattn: interrupted, no file was written\n")
    assert set(ready.iterdir()) == before


def test_interrupted_run_goes_on(ready, capsys, monkeypatch):
    """Prevents an interruption that loses what was measured, or a second run that counts it twice."""
    from sglang_triattn.calibration import query_sums

    command = ("--model", "model", "--data", "text", "--window", "64", "--out", "s.safetensors")
    assert run(*command) == 0
    whole = load_stats("s.safetensors")
    before = set(ready.iterdir())
    monkeypatch.setattr("sglang_triattn.calibration.transformers_engine.SAVE_EVERY_TOKENS", 100)
    unrotate, calls = query_sums.unrotate, []

    def counting(*arguments):
        calls.append(arguments)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return unrotate(*arguments)

    monkeypatch.setattr(query_sums, "unrotate", counting)
    assert run(*command) == 130
    assert "the same command goes on from s.partial.safetensors\n" in capsys.readouterr().err
    assert set(ready.iterdir()) - before == {ready / "s.partial.safetensors"}
    assert run(*command) == 0
    # Two layers in seven windows, two of which were finished and kept.
    assert len(calls) == 6 + 2 * (7 - 2)
    assert "going on after 2 of 7 texts" in capsys.readouterr().err
    assert set(ready.iterdir()) == before
    again = load_stats("s.safetensors")
    torch.testing.assert_close(again.mean, whole.mean)
    assert again.token_count == whole.token_count == 400


def test_several_files_and_chats(ready):
    """Prevents a second --data from replacing the first."""
    make_text(ready / "more.txt", 100, seed=1)
    command = ("--model", "model", "--data", "text", "--data", "more.txt", "--out", "s.safetensors")
    assert run(*command) == 0
    assert load_stats("s.safetensors").token_count == 500


def test_running_out_of_memory_is_explained(ready, capsys, monkeypatch):
    """Prevents CUDA's page of text for the most likely failure on a small GPU."""

    def exhaust(*arguments, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate ...")

    monkeypatch.setattr("sglang_triattn.calibration.query_sums.unrotate", exhaust)
    assert run("--model", "model", "--data", "text", "--out", "s.safetensors") == 2
    assert "ran out of memory: use a smaller --window" in capsys.readouterr().err


def test_help_loads_neither_torch_nor_transformers():
    """Prevents a help text that takes seconds to appear."""
    code = (
        "import sys; from sglang_triattn.cli import main as cli\n"
        "try: cli.main(['calibrate', '--help'])\n"
        "except SystemExit as exit: assert exit.code == 0\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "--max-tokens" in result.stdout


def test_the_version_is_printed(capsys):
    """Prevents reports of faults by users who cannot say which version they have."""
    with pytest.raises(SystemExit) as error:
        cli.main(["--version"])
    assert error.value.code == 0
    assert capsys.readouterr().out == f"sglang-triattn {__version__}\n"


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("plan --model m --memory 1G --triattention-budgt 100", "use --triattention-budget, or leave it out."),
        ("plan --model m --memory 1G --triattention-sinks 4", "--triattention-sinks 4"),
        ("verify --url http://h --api-kei k", "use --api-key, or leave it out."),
        ("top --triattention-budget 100", "--triattention-budget 100: leave it out."),
    ],
)
def test_flags_that_do_not_exist(words, hint, capsys):
    """Prevents a search in --help for a flag that was only mistyped."""
    with pytest.raises(SystemExit) as error:
        cli.main(words.split())
    assert error.value.code == 2
    assert hint in capsys.readouterr().err


MISTAKES = [
    ["calibrate"],
    ["calibrate", "--model", "m", "--out", "s.safetensors"],
    ["calibrate", "--model", "m", "--out", "s.safetensors", "--data", "no-such-file"],
    ["calibrate", "--model", "m", "--out", "s.safetensors", "--data", "/dev/null", "--max-tokens", "3"],
    ["calibrate", "--model", "m", "--out", "s.safetensors", "--engine", "sglang", "--self", "-1"],
    ["verify", "--url", "localhost:30000"],
    ["top", "--url", "localhost:30000", "--once"],
    ["stats", "none.png", "--plot", "x.jpg"],
    ["check"],
]


@pytest.mark.parametrize("words", MISTAKES, ids=" ".join)
def test_mistakes_load_neither_torch_nor_transformers(words):
    """Prevents seconds of imports before a user hears that an argument is missing."""
    code = (
        "import sys; from sglang_triattn.cli import main as cli\n"
        f"try: status = cli.main({words!r})\n"
        "except SystemExit as exit: status = exit.code\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy import'\n"
        "sys.exit(status)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_a_reader_that_goes_away_is_no_error():
    """Prevents a traceback after `sglang-triattn check ... | head -1`."""
    code = "import sys; from sglang_triattn.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "check", "--model", str(QWEN3_32B)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdout.close()
        errors = running.stderr.read()
    assert (running.returncode, errors) == (141, "")


@pytest.mark.parametrize("arguments", [[], ["unknown"], ["calibrate"], ["calibrate", "--max-tokens", "many"]])
def test_wrong_arguments_exit_with_status_2(arguments, capsys):
    """Prevents a subcommand from starting with arguments it did not get."""
    with pytest.raises(SystemExit) as error:
        cli.main(arguments)
    assert error.value.code == 2
    assert "usage: sglang-triattn" in capsys.readouterr().err
