"""Which prepared environments `make clean-envs` removes."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import clean_envs
import env

SHARED, OTHER, OWN, OTHERS_OWN = (
    "env-5eed00000001",
    "env-5eed00000002",
    "checkout-5eed00000003",
    "checkout-5eed00000004",
)


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The folder of environments; this checkout has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = env.cache_root()
    folder.mkdir()
    return folder


@pytest.fixture
def make(cache):
    def make(name: str, days: float, **stamp: Path) -> Path:
        """An environment that was last used so many days ago, with its lock; `stamp` is that of a checkout."""
        directory = cache / name
        (directory / "bin").mkdir(parents=True)
        (directory / "bin" / "large").write_bytes(b"x" * 200_000)
        (directory / env.MARKER).write_text(json.dumps({key: str(value) for key, value in stamp.items()}))
        then = time.time() - days * 86400
        for path in (directory / env.MARKER, directory / env.LAST_USED, directory / "pyvenv.cfg"):
            path.touch()
            os.utime(path, (then, then))
        (cache / f"{name}.lock").touch()
        return directory

    return make


def left(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir()}


def test_unused_ones_are_removed_and_measured(cache, make, capsys):
    """Prevents a disk that fills up, and a user who does not learn what went and how much that was."""
    make(SHARED, 29)
    gone = make(OTHER, 31)
    number, freed = clean_envs.clean()
    assert number == 1
    assert 200_000 <= freed < 300_000
    assert left(cache) == {SHARED, f"{SHARED}.lock"}
    assert capsys.readouterr().out == f"removed {gone}, 0.0 GB: not used for 31 days\n"


@pytest.mark.parametrize("stamp", [env.LAST_USED, "pyvenv.cfg"])
def test_use_without_make_counts(cache, make, stamp):
    """Prevents the removal of an environment whose python is started by its path."""
    recent = time.time() - 86400
    os.utime(make(SHARED, 31) / stamp, (recent, recent))
    assert clean_envs.clean() == (0, 0)


def test_that_of_this_checkout_stays(cache, make, monkeypatch, tmp_path):
    """Prevents 11 GB from being installed again for the checkout that the command is given in."""
    monkeypatch.setattr(env, "shared_directory", lambda root: cache / SHARED)
    monkeypatch.setattr(env, "checkout_stamp", lambda root, shared: "stamp")
    (tmp_path / "pyproject.toml").touch()
    shared, own = make(SHARED, 99), env.checkout_directory("stamp")
    make(own.name, 99, checkout=tmp_path, shared=shared)
    make(OWN, 99, checkout=tmp_path, shared=shared)
    assert clean_envs.clean()[0] == 1
    assert left(cache) == {name + suffix for name in (SHARED, own.name) for suffix in ("", ".lock")}


def test_one_that_a_process_runs_from_stays(cache, make):
    """Prevents a server that has run for a month from losing its packages."""
    directory = make(SHARED, 99)
    command = [sys.executable, "-c", "input()", str(directory / "bin" / "python")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        assert clean_envs.clean() == (0, 0)
        process.communicate(b"\n", timeout=30)
    assert clean_envs.clean()[0] == 1


def test_one_that_is_being_installed_stays(cache, make, capsys):
    """Prevents the removal of what pip has installed so far."""
    directory = make(SHARED, 0)
    (directory / env.MARKER).unlink()
    with env.exclusive_lock(directory.with_suffix(".lock")):
        assert clean_envs.clean() == (0, 0)
    assert capsys.readouterr().out.startswith("kept ")
    assert directory.exists()


def test_leftovers_are_removed_and_nothing_else(cache, make):
    """Prevents interrupted installs and locks from staying for ever, and models from being taken for either."""
    (make(SHARED, 0) / env.MARKER).unlink()
    (make(OTHER, 0) / "pyvenv.cfg").unlink()
    (cache / f"{OWN}.lock").touch()
    kept = {"models", "upstream-sglang-0.5.22-py3.11", "upstream-sglang-0.5.22-py3.11.lock", "env-notes"}
    for name in kept:
        (cache / name).mkdir()
    assert clean_envs.clean()[0] == 2
    assert left(cache) == kept


def test_those_of_checkouts_that_are_gone_are_removed(cache, make, tmp_path):
    """Prevents an environment for each temporary clone from piling up."""
    shared = make(SHARED, 0)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "pyproject.toml").touch()
    kept = make(OWN, 0, checkout=tmp_path / "here", shared=shared)
    make(OTHERS_OWN, 0, checkout=tmp_path / "gone", shared=shared)
    assert clean_envs.clean()[0] == 1
    assert left(cache) == {path.name + suffix for path in (shared, kept) for suffix in ("", ".lock")}


def test_one_whose_shared_environment_goes_is_removed_too(cache, make, tmp_path):
    """Prevents an environment that can import nothing from staying."""
    (tmp_path / "pyproject.toml").touch()
    make(OWN, 1, checkout=tmp_path, shared=make(SHARED, 31))
    assert clean_envs.clean()[0] == 2
    assert left(cache) == set()


def test_an_older_python_is_refused_in_one_sentence(monkeypatch):
    """Prevents a traceback where python3 is too old to read pyproject.toml."""
    monkeypatch.setattr(env, "MINIMUM_PYTHON", (99, 0))
    with pytest.raises(SystemExit, match=r"Python 99\.0 or newer is needed"):
        clean_envs.main()
