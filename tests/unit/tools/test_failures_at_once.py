"""What a stopped run of the tests has already shown."""

import subprocess
import sys

import pytest

from checkout import ROOT

CASES = """
import os

def test_fails():
    assert "the cause" == "another"

def test_ends_everything():
    os._exit(0)
"""


def output_of(folder, cases: str, *options: str) -> str:
    """What pytest writes about these cases, run with the options and plugins of tests/conftest.py."""
    (folder / "test_cases.py").write_text(cases)
    command = [sys.executable, "-P", "-m", "pytest", "-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "conftest"]
    command += ["-o", f"pythonpath={ROOT / 'tests'} {ROOT / 'tests/support/common'} {ROOT / 'tools'}", *options]
    command += ["-p", "no:cacheprovider", folder / "test_cases.py"]
    return subprocess.run(command, cwd=ROOT / "tests", capture_output=True, text=True, timeout=120).stdout


def test_a_run_that_dies_has_shown_its_failures(tmp_path):
    """Prevents the loss of a failure's cause with the run: by a limit of time, by memory, by a signal."""
    written = output_of(tmp_path, CASES)
    assert "= FAILURES =" not in written
    assert "test_fails failed at its call:" in written
    assert "AssertionError: assert 'the cause' == 'another'" in written


@pytest.mark.parametrize("options", [(), ("-n", "1")])
def test_each_failure_is_shown_once_before_the_end(tmp_path, options):
    """Prevents silence, or a failure shown by each process, where tests run in processes of their own."""
    written = output_of(tmp_path, CASES.partition("def test_ends")[0], *options)
    before, title, _ = written.partition("= FAILURES =")
    assert title
    assert before.count("failed at its call:") == 1
