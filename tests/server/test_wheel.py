"""The package as the container's image and `pip install` install it, without the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

import build_dist
import dockerfile
import server
from checkout import ROOT
from harness import STRICT, Client, assert_pool_is_whole, compressed_args, compression, prompt
from plan_cases import CONFIGS

# Nothing of a checkout, however the tests were started.
ALONE = {"PYTHONPATH": ""}
# What a clone contains, as opposed to what accumulates in a checkout that was worked in.
SOURCES = ("sglang_triattn", "kernels", "patches", "pyproject.toml", "README.md", "LICENSE")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info")
EPOCH = 1_700_000_000


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(sdist, wheel); the wheel is built from the sdist."""
    source = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=LEFTOVERS)
        else:
            shutil.copy(ROOT / name, source)
    return build_dist.build(source, tmp_path_factory.mktemp("dist"), EPOCH)


@pytest.fixture(scope="module")
def image(tmp_path_factory) -> Path:
    """A folder in which the steps of docker/Dockerfile have run, with a Python for an image."""
    folder = tmp_path_factory.mktemp("image")
    dockerfile.build(folder, dockerfile.bare_python(folder), ALONE)
    return folder


def content(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_wheel_and_sdist_hold_the_checkout(built):
    """Prevents a folder, the marker of typed code or a data file from existing only in a checkout."""
    build_dist.check(*built, ROOT)


def test_a_wheel_is_dated_by_its_commit(built):
    """Prevents two builds of one commit from being different files."""
    with zipfile.ZipFile(built[1]) as archive:
        assert len({member.date_time for member in archive.infolist()}) == 1


def test_the_image_has_the_wheel_of_the_release(built, image):
    """Prevents an image that lacks what a released wheel has: it builds its own from the checkout, without an sdist."""
    (wheel,) = (image / "wheel" / "build" / "ready").glob("*.whl")
    assert content(wheel) == content(built[1])


def test_the_command_in_the_image(image):
    """Prevents a subcommand that reads something of the checkout."""
    command = [image / "venv" / "bin" / "sglang-triattn", "check", "--model", CONFIGS / "qwen3-32b.json"]
    env = os.environ | ALONE
    done = subprocess.run(list(map(str, command)), cwd="/", env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--enable-triattention compresses")


@pytest.mark.wide
def test_a_server_in_the_image(image, tiny, tmp_path):
    """Prevents a package that finds its flags, platform, kernels or data only through a checkout.

    The server is started by the image's entry point, which alone turns compression on.
    """
    python = image / "venv" / "bin" / "python3"
    log, port = tmp_path / "server.log", server.free_port()
    first, *started = dockerfile.find("ENTRYPOINT").words
    options = server.launch_command(tiny.path, port, compressed_args(tiny))[3:]
    options.remove("--enable-triattention")
    assert first == "python3"
    env = os.environ | STRICT | ALONE
    with server.running_process([str(python), *started, *options], port, env, log) as running:
        server.wait_until_healthy(running)
        client = Client(running)
        report = compression(client.generate(prompt(1, 20), 150))
        assert report["evicted_tokens"] == report["freed_slots"] > 0
        assert_pool_is_whole(client)
        # What a container's daemon runs, at the port that the image serves at.
        probe = [word.replace(":30000", f":{port}") for word in dockerfile.find("HEALTHCHECK").words]
        subprocess.run([str(python), *probe[1:]], check=True, timeout=60)
    assert str(ROOT) not in log.read_text()
    code = "import sglang_triattn.patches.plugin as p; print(p.__file__)"
    found = subprocess.run([str(python), "-c", code], cwd="/", env=env, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(image / "venv")
