"""Which interpreted tests of kernels run again, and which are known to pass."""

from __future__ import annotations

import shutil
import subprocess

import pytest

import interpreter
from checkout import ROOT

ARGUMENTS = ("tests/gpu", "-m", "not wide")
KERNEL = "VALUE = 1\n"
TEST = "from sglang_triattn.kernels.one import VALUE\n\ndef test_one():\n    assert VALUE == 1\n"


@pytest.fixture
def checkout(tmp_path):
    """A checkout of one kernel, its test, its reference data and a file that has nothing to do with them."""
    for name, text in (
        ("sglang_triattn/__init__.py", ""),
        ("sglang_triattn/other.py", ""),
        ("kernels/__init__.py", ""),
        ("kernels/one.py", KERNEL),
        ("tests/conftest.py", "import common\n"),
        ("tests/support/common/common.py", ""),
        ("tests/server/conftest.py", ""),
        ("tests/gpu/test_one.py", TEST),
        ("tests/golden/scores.json", "{}"),
        ("tests/support/unit/quick_interpreter.py", ""),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def key_of(checkout, *arguments: str) -> str:
    interpreter._checkout.cache_clear()
    return interpreter.key_of(checkout, arguments or ARGUMENTS)


@pytest.mark.parametrize(
    "changed",
    [
        *("kernels/one.py", "kernels/__init__.py", "tests/gpu/test_one.py", "tests/golden/scores.json"),
        *("tests/conftest.py", "tests/support/common/common.py"),
    ],
)
def test_what_tests_depend_on_has_them_run_again(checkout, changed):
    """Prevents a changed kernel, test or reference from passing because another one did."""
    before = key_of(checkout)
    (checkout / changed).write_text((checkout / changed).read_text() + "\n")
    assert key_of(checkout) != before


def test_what_they_do_not_depend_on_leaves_them(checkout):
    """Prevents minutes of interpreting after every change, and equal keys of different sets."""
    before = key_of(checkout)
    for other in ("sglang_triattn/other.py", "tests/server/conftest.py"):
        (checkout / other).write_text("VALUE = 2\n")
        assert key_of(checkout) == before
    assert key_of(checkout, "tests/gpu", "-m", "wide") != before


def test_only_what_passed_is_remembered(tmp_path, monkeypatch):
    """Prevents a failure, or a run of nothing, from counting as a pass, and a pass from being forgotten."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ran = []

    def run(code: int, line: str) -> None:
        def started(command, **options):
            ran.append(command)
            return subprocess.CompletedProcess(command, code, line, "")

        monkeypatch.setattr(interpreter.subprocess, "run", started)

    for code, line in ((1, "1 failed, 1 passed"), (0, "2 skipped")):
        run(code, line)
        with pytest.raises(AssertionError):
            interpreter.assert_pass_interpreted(*ARGUMENTS)
    run(0, "1 passed")
    for _ in range(2):
        interpreter.assert_pass_interpreted(*ARGUMENTS)
    assert len(ran) == 3
