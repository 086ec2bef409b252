"""The environments that `make` prepares: what is installed into which, and when."""

import json
import os
import threading
import time
from pathlib import Path

import pytest

import env
from checkout import ROOT

PYPROJECT = """
[project]
name = "x"
version = "{version}"
dependencies = ["torch"]
optional-dependencies = {{ dev = ["{dev}"] }}
"""


@pytest.fixture
def checkout(tmp_path):
    def write(name="checkout", version="1", dev="pytest", constraints="torch==1\n", code="") -> Path:
        root = tmp_path / name
        (root / "sglang_triattn").mkdir(parents=True, exist_ok=True)
        (root / "sglang_triattn" / "__init__.py").write_text(code)
        (root / "pyproject.toml").write_text(PYPROJECT.format(version=version, dev=dev))
        (root / "constraints.txt").write_text(constraints)
        return root

    return write


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """The commands of `prepare`, which run nothing; only venv leaves a python and a folder for packages."""
    commands = []

    def record(command, lock, failure):
        commands.append([str(part) for part in command])
        if "venv" in commands[-1]:
            (Path(command[-1]) / "lib" / "python3.11" / "site-packages").mkdir(parents=True)
            (Path(command[-1]) / "bin").mkdir()
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(env, "_run", record)
    monkeypatch.setattr(env, "DISK_BYTES_NEEDED", 0)
    return commands


def test_key_changes_with_what_is_installed_and_with_nothing_else(checkout):
    """Prevents 11 GB from being installed once more for the same pins, and old pins from being used."""
    key = env.environment_key(checkout(), (3, 11))
    assert len(key) == 12
    assert int(key, 16) >= 0
    assert env.environment_key(checkout(version="2"), (3, 11)) == key
    others = [
        env.environment_key(checkout(), (3, 12)),
        env.environment_key(checkout(dev="ruff"), (3, 11)),
        env.environment_key(checkout(constraints="torch==2\n"), (3, 11)),
    ]
    assert len({key, *others}) == 4


def test_key_stays_when_a_requirement_becomes_an_extra(tmp_path):
    """Prevents 11 GB from being installed once more because users no longer need what checkouts still have."""
    tables = [
        ('["a==1", "b", "plots", "z"]', '{ dev = ["pytest"] }'),
        ('["a==1", "b", "z"]', '{ plot = ["plots"], dev = ["plots", "pytest"] }'),
        ('["a==1", "b", "z"]', '{ dev = ["pytest"] }'),
    ]
    keys = []
    (tmp_path / "constraints.txt").touch()
    for dependencies, extras in tables:
        lines = f"dependencies = {dependencies}\noptional-dependencies = {extras}\n"
        (tmp_path / "pyproject.toml").write_text(f"[project]\n{lines}")
        keys.append(env.environment_key(tmp_path, (3, 11)))
    assert keys[0] == keys[1] != keys[2]


def test_second_run_installs_nothing(checkout, installed):
    """Prevents every target of make from taking seconds longer."""
    python = env.prepare(checkout())
    installed.clear()
    assert env.prepare(checkout()) == python
    assert installed == []


def test_shared_environment_has_the_dependencies_alone(checkout, installed):
    """Prevents one checkout's code from being what another one's tests run."""
    root = checkout()
    env.prepare(root)
    shared = env.shared_directory(root)
    (command,) = (one for one in installed if "install" in one and one[0].startswith(str(shared)))
    assert {"setuptools", "torch", "pytest"} <= set(command)
    assert not [part for part in command if part == "-e" or part == str(root)]


def test_interrupted_install_is_done_again_from_nothing(checkout, installed):
    """Prevents the use of an environment that lacks packages; one of a checkout stands on the new one."""
    old = env.prepare(checkout())
    directory = env.shared_directory(checkout())
    (directory / env.MARKER).unlink()
    leftover = directory / "leftover"
    leftover.touch()
    installed.clear()
    assert env.prepare(checkout()) != old
    assert len(installed) == 4
    assert not leftover.exists()


def test_interrupted_install_of_a_checkout_is_done_again(checkout, installed):
    """Prevents the use of an environment without entry points or commands, and 11 GB for its sake."""
    python = env.prepare(checkout())
    (python.parents[1] / env.MARKER).unlink()
    installed.clear()
    assert env.prepare(checkout()) == python
    assert [Path(one[0]).parents[1].name[:4] for one in installed] == ["env-", "chec"]
    assert "--no-deps" in installed[1]


def test_each_checkout_has_its_own_python(checkout, installed):
    """Prevents two checkouts from taking turns at one environment while both are tested."""
    pythons = [env.prepare(checkout(name=name)) for name in ("one", "other")]
    assert len(set(pythons)) == 2
    installed.clear()
    assert [env.prepare(checkout(name=name)) for name in ("one", "other")] == pythons
    assert installed == []


@pytest.mark.parametrize("change", [{"version": "2"}, {"code": "__version__ = '2'"}])
def test_new_metadata_leave_what_runs_alone(checkout, installed, change):
    """Prevents stale entry points and versions, and servers that lose their Python to a change of pyproject.toml."""
    old = env.prepare(checkout())
    installed.clear()
    new = env.prepare(checkout(**change))
    assert new != old
    assert (old.parents[1] / env.MARKER).exists()
    assert len(installed) == 2


def test_editable_install_is_taken_out_of_the_shared_environment(checkout, installed):
    """Prevents an environment of an earlier commit from being installed again, or from keeping a checkout's code."""
    root = checkout()
    env.prepare(root)
    shared = env.shared_directory(root)
    stamp, metadata = shared / "checkout.json", env.site_packages(shared) / "sglang_triattn-0.1.0.dist-info"
    stamp.touch()
    metadata.mkdir()
    installed.clear()
    env.prepare(root)
    (command,) = installed
    assert command[0] == str(shared / "bin" / "python")
    assert command[-3:] == ["-q", "-y", "sglang-triattn"]
    assert not stamp.exists()


def test_processes_that_prepare_at_once_install_once(checkout, installed, monkeypatch):
    """Prevents `make lint` and `make test` of one checkout, started together, from removing what the other installs."""
    root, record, pythons = checkout(), env._run, []

    def slow(*arguments):
        record(*arguments)
        time.sleep(0.1)

    monkeypatch.setattr(env, "_run", slow)
    threads = [threading.Thread(target=lambda: pythons.append(env.prepare(root))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(pythons) == 3
    assert len(set(pythons)) == 1
    # venv and pip, for the shared environment and for the checkout's.
    assert len(installed) == 4


def test_each_use_is_recorded(checkout, installed):
    """Prevents the removal of an environment that is used every day."""
    own = env.prepare(checkout()).parents[1]
    stamps = [directory / env.LAST_USED for directory in (own, env.shared_directory(checkout()))]
    for stamp in stamps:
        os.utime(stamp, (0, 0))
    env.prepare(checkout())
    assert all(stamp.stat().st_mtime > 0 for stamp in stamps)


def test_an_install_names_the_way_to_remove_others(checkout, installed, capsys):
    """Prevents disks from filling with environments of old pins, 11 GB each, unnoticed."""
    env.prepare(checkout())
    assert "clean-envs" not in capsys.readouterr().err
    env.prepare(checkout(constraints="torch==2\n"))
    assert "other environments are there: 1; `make clean-envs`" in capsys.readouterr().err


def test_full_disk_gives_one_sentence(checkout, installed, monkeypatch):
    """Prevents an installation that fails after minutes, in pip's words."""
    monkeypatch.setattr(env, "DISK_BYTES_NEEDED", 10**18)
    with pytest.raises(SystemExit, match="XDG_CACHE_HOME"):
        env.prepare(checkout())
    assert installed == []


def test_stamp_names_the_checkout(checkout, installed):
    """Prevents environments of removed checkouts from never being found."""
    root = checkout()
    stamp = json.loads((env.prepare(root).parents[1] / env.MARKER).read_text())
    assert (stamp["checkout"], stamp["shared"]) == (str(root), str(env.shared_directory(root)))


def test_commands_run_the_python_of_the_environment_that_they_are_in(tmp_path):
    """Prevents `bin/pytest` of a checkout from running without the checkout's code."""
    source, target = tmp_path / "shared" / "bin", tmp_path / "own" / "bin"
    source.mkdir(parents=True)
    target.mkdir(parents=True)
    contents = {
        "python": b"\x7fELF shared",
        "pytest": b"#!/elsewhere/bin/python3\nimport pytest\n",
        "long": b"#!/bin/sh\n'''exec' /long/bin/python \"$0\" \"$@\"\n' '''\nimport long\n",
        "shell": b"#!/bin/sh\ntrue\n",
        "ruff": b"\x7fELF ruff",
    }
    for name, content in contents.items():
        (source / name).write_bytes(content)
        (source / name).chmod(0o755)
    (target / "python").write_bytes(b"own")
    env._copy_commands(source, target)
    assert (target / "python").read_bytes() == b"own"
    first = f"#!{target}/python\n".encode()
    assert (target / "pytest").read_bytes() == first + b"import pytest\n"
    assert (target / "long").read_bytes() == first + contents["long"].removeprefix(b"#!/bin/sh\n")
    assert {name for name in contents if (target / name).is_symlink()} == {"shell", "ruff"}
    assert all(os.access(target / name, os.X_OK) for name in contents if name != "python")


def test_a_removed_lock_file_is_no_lock(tmp_path, monkeypatch):
    """Prevents two processes from installing at once: one waited for a lock file that its holder then removed."""
    path, waits = tmp_path / "x.lock", threading.Event()
    flock = env.fcntl.flock

    def watched(file, operation):
        if not operation & env.fcntl.LOCK_NB:
            waits.set()
        flock(file, operation)

    monkeypatch.setattr(env.fcntl, "flock", watched)
    held = []

    def second():
        with env.exclusive_lock(path) as file:
            held.append(path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())))

    thread = threading.Thread(target=second)
    with env.exclusive_lock(path):
        thread.start()
        assert waits.wait(30)
        path.unlink()
    thread.join(30)
    assert held == [True]


def test_constraints_pin_every_direct_dependency():
    """Prevents an environment whose packages depend on the day of the installation."""
    import tomllib

    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert set(extras["plot"]) <= set(extras["dev"])
    wanted = [*project["dependencies"], *extras["dev"], "setuptools"]
    assert {name.split("==")[0] for name in wanted} <= pinned
