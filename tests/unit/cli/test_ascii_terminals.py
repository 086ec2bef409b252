"""Terminals that know ASCII alone; test_top.py draws the view of `top` in one."""

import os
import subprocess
import sys

PRINT_A_FAULT = (
    "from sglang_triattn.doctor.rows import Row; from sglang_triattn.cli.main import main; "
    "doctor._parts = lambda model: [('Part', lambda: [Row('name', 'wrong', 'Bücher', 'consequence')])]; "
    "sys.exit(main(['doctor']))"
)


def test_terminals_that_know_ascii_alone():
    """Prevents a UnicodeEncodeError where the locale is C, for a fault or a path of other letters."""
    code = "import sys; from sglang_triattn.cli.main import main; sys.exit(main())"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-P", "-c", code, "check", "--model", "Bücher"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, b"")
    assert rb"--model B\xfccher cannot be read" in done.stderr
    code = f"import sys; sys.path[:0] = {sys.path!r}; from sglang_triattn.cli import doctor; {PRINT_A_FAULT}"
    done = subprocess.run([sys.executable, "-P", "-c", code], env=environment, capture_output=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert b"1 row: 1 fault, no notes" in done.stdout
