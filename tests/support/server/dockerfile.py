"""docker/Dockerfile without a Docker daemon: its instructions, and its steps for this package run in a folder.

Each build stage is a folder, and `python3` is one of a virtual environment that has what SGLang's image has: all
packages of this environment, but not this project.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from checkout import ROOT

DOCKERFILE = ROOT / "docker" / "Dockerfile"
MOUNT = re.compile(r"--mount=type=bind,from=(?P<stage>\w+),source=(?P<source>\S+),target=(?P<target>[^\s,]+),rw\s+")
# It needs a machine of its own.
ADDS_A_USER = "useradd "


@dataclass(frozen=True)
class Instruction:
    """One instruction, its lines joined: its name, and what follows."""

    name: str
    rest: str

    @property
    def words(self) -> list[str]:
        """The list of an instruction in exec form, options before it left out."""
        return json.loads(self.rest[self.rest.index("[") :])


def instructions() -> list[Instruction]:
    """All instructions, comments left out."""
    lines = [line for line in DOCKERFILE.read_text().splitlines() if line and not line.startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [Instruction(*re.split(r"\s+", line.strip(), maxsplit=1)) for line in joined.splitlines()]


def find(name: str) -> Instruction:
    """The only instruction of this name."""
    (found,) = (one for one in instructions() if one.name == name)
    return found


def context() -> list[str]:
    """Files and folders that .dockerignore lets through: it refuses everything and then names exceptions."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    return [line.removeprefix("!") for line in lines[1:] if line.startswith("!")]


def copies() -> Iterator[tuple[list[str], str]]:
    """(sources, target) of each COPY, all of them from the checkout."""
    for one in instructions():
        if one.name == "COPY":
            *sources, target = one.rest.split()
            yield sources, target


def bare_python(folder: Path) -> Path:
    """A new virtual environment with all packages of this one except this project; returns its python."""
    venv.create(folder / "venv", symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    # Packages of an environment of `tools/env.py` are in another one, which it stands on.
    for entry in Path(importlib.metadata.distribution("sglang").locate_file("")).iterdir():
        # An editable install is a .dist-info, a .pth file and its finder.
        if "sglang_triattn" not in entry.name:
            (packages / entry.name).symlink_to(entry)
    (site,) = (folder / "venv").glob("lib/python*/site-packages")
    (site / "packages.pth").write_text(f"{packages}\n")
    return folder / "venv" / "bin" / "python3"


def build(folder: Path, python: Path, env: dict[str, str]) -> Path:
    """Runs every step of the Dockerfile but the one that adds a user; returns the last stage's folder."""
    env = {**os.environ, **env, "PATH": f"{python.parent}:{os.environ['PATH']}", "PIP_NO_INDEX": "1"}
    stage = here = folder
    for one in instructions():
        if one.name == "FROM":
            stage = here = folder / (one.rest.split(" AS ")[1] if " AS " in one.rest else "image")
        elif one.name == "WORKDIR":
            here = stage / one.rest.lstrip("/")
            here.mkdir(parents=True, exist_ok=True)
        elif one.name == "COPY":
            *sources, target = one.rest.split()
            for source in sources:
                assert source in context(), f"{source} does not reach the builder"
                _copy(ROOT / source, here / target)
        elif one.name == "RUN" and not one.rest.startswith(ADDS_A_USER):
            _run(one.rest, folder, stage, here, env)
    return stage


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _run(command: str, folder: Path, stage: Path, here: Path, env: dict[str, str]) -> None:
    mount = MOUNT.match(command)
    if mount is not None:
        command = command[mount.end() :]
        target = stage / mount["target"].lstrip("/")
        shutil.copytree(folder / mount["stage"] / mount["source"].lstrip("/"), target, dirs_exist_ok=True)
    shell = ["bash", "-o", "pipefail", "-c", command]
    done = subprocess.run(shell, cwd=here, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
