"""`make upstream`, as far as it makes decisions."""

import json
import subprocess
import sys

import pytest

import upstream
from sglang_triattn.patches.hooks.hook import SGLANG_VERSION


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """The commands that are run, none of them really; pip knows version 9.9.9, and doctor finds one fault."""
    commands = []
    rows = [
        {"part": "p", "name": "a", "status": "ok", "found": "(self)"},
        {"part": "p", "name": "b", "status": "changed", "found": "takes (x)", "consequence": "nothing works"},
    ]

    def run(command, **options):
        commands.append((command, options))
        if "--target" in command:
            (upstream.folder_of("9.9.9")).mkdir(parents=True)
        output = "sglang (9.9.9)\n" if "index" in command else json.dumps({"ok": False, "rows": rows})
        return subprocess.CompletedProcess(command, 1 if "-c" in command else 0, output, "")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["upstream.py"])
    return commands


def test_the_pinned_version_is_not_installed(ran, monkeypatch, capsys):
    """Prevents minutes of installing what is already there."""
    monkeypatch.setattr(upstream, "newest", lambda: SGLANG_VERSION)
    assert upstream.main() == 0
    assert "nothing installed" in capsys.readouterr().out
    assert ran == []


def test_what_would_break_is_printed(ran, tmp_path, capsys):
    """Prevents an upgrade of the pinned environment, and faults that are found and not printed."""
    assert upstream.main() == 1
    output = capsys.readouterr().out
    assert "changed  b\n         takes (x)\n         → nothing works\n\n2 rows, 1 fault\n" in output
    assert "(self)" not in output
    install, doctor = ran[1:]
    folder = str(upstream.folder_of("9.9.9"))
    assert install[0][-4:] == ["--no-deps", "--target", folder, "sglang==9.9.9"]
    assert folder.startswith(str(tmp_path))
    assert doctor[1]["env"]["PYTHONPATH"].startswith(folder)
    assert upstream.main() == 1
    assert [command for command, _ in ran if "--target" in command] == [install[0]]


def test_no_registry_gives_one_sentence(monkeypatch):
    """Prevents a traceback without a network."""
    failed = subprocess.CompletedProcess([], 1, "", "WARNING\nERROR: No matching distribution found for sglang")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(SystemExit, match="pip found no SGLang"):
        upstream.newest()
