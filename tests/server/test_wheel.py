"""The package as `pip install` installs it, with nothing of the checkout beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

import server
from checkout import ROOT
from harness import STRICT, Client, assert_pool_is_whole, compressed_args, compression, prompt

# Nothing of a checkout, however the tests were started.
ALONE = {"PYTHONPATH": ""}
# What a clone contains, as opposed to what accumulates in a checkout that was worked in.
SOURCES = ("sglang_triattn", "kernels", "patches", "pyproject.toml", "README.md", "LICENSE")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=LEFTOVERS)
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    done = subprocess.run(command, cwd=out, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """A Python with the wheel and everything in this environment except this project."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, str(built[1])], env=os.environ | ALONE, check=True, timeout=120)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A plain path: the .pth files in that folder, the editable install's among them, are not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    return python


def test_wheel_and_sdist_hold_the_same_package(built):
    """Prevents a folder, the marker of typed code or a data file from existing only in a checkout."""
    ours = set()
    for top, folder in (("", "sglang_triattn"), ("sglang_triattn", "kernels"), ("sglang_triattn", "patches")):
        # Links to folders are not followed.
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts)
        ours |= {PurePosixPath(top, path.relative_to(ROOT).as_posix()) for path in files}
    sdist, wheel = built
    with zipfile.ZipFile(wheel) as archive:
        packed = {PurePosixPath(name) for name in archive.namelist()}
    assert {path for path in packed if ".dist-info" not in path.parts[0]} == ours
    with tarfile.open(sdist) as archive:
        names = (PurePosixPath(*PurePosixPath(member.name).parts[1:]) for member in archive if member.isfile())
        assert {path for path in names if path.parts[0] == "sglang_triattn"} == ours


def test_a_server_from_the_wheel(installed, tiny, tmp_path):
    """Prevents a package that finds its flags, platform, kernels or data only through a checkout."""
    log = tmp_path / "server.log"
    port = server.free_port()
    command = [str(installed), *server.launch_command(tiny.path, port, compressed_args(tiny))[1:]]
    env = os.environ | STRICT | ALONE
    with server.running_process(command, port, env, log) as running:
        server.wait_until_healthy(running)
        client = Client(running)
        report = compression(client.generate(prompt(1, 20), 150))
        assert report["evicted_tokens"] == report["freed_slots"] > 0
        assert_pool_is_whole(client)
    assert str(ROOT) not in log.read_text()
    code = "import sglang_triattn.patches.plugin as p; print(p.__file__)"
    found = subprocess.run([str(installed), "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(installed.parents[1])
