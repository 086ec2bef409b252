"""Two checkouts that are used at once: each must run its own code."""

from __future__ import annotations

import json
import shutil
import site
import subprocess
import sys
from pathlib import Path

import pytest

import dockerfile
import env
from checkout import ROOT

SOURCES = ("sglang_triattn", "kernels", "patches", "tools", "pyproject.toml", "constraints.txt", "README.md", "LICENSE")
LEFTOVERS = shutil.ignore_patterns("__pycache__", "*.egg-info")
VERSIONS = ("7.7.1", "7.7.2")
# Prints what each process finds: the first one, one that it starts, and one that multiprocessing starts.
PROBE = """
import json, multiprocessing, site, subprocess, sys
from importlib import metadata, util

def seen(argument):
    import packaging, sglang_triattn
    points = [*metadata.entry_points(group="sglang.srt.plugins"), *metadata.entry_points(group="sglang.srt.platforms")]
    return {
        "code": [sglang_triattn.__file__, sglang_triattn.__version__],
        "metadata": metadata.version("sglang-triattn"),
        "points": {
            point.name: util.find_spec(point.module).origin
            for point in points
            if point.module.startswith("sglang_triattn")
        },
        "prefix": sys.prefix,
        "site": site.getsitepackages(),
    }

if __name__ == "__main__" and sys.argv[1:]:
    print(json.dumps(seen(None)))
elif __name__ == "__main__":
    child = subprocess.run([sys.executable, __file__, "child"], stdout=subprocess.PIPE, check=True)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([seen(None), json.loads(child.stdout), pool.apply(seen, (None,))]))
"""


def clone(folder: Path, version: str) -> Path:
    """A checkout of another version, whose plugin has the version in its name and whose command prints its file."""
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=LEFTOVERS)
        else:
            shutil.copy(ROOT / name, folder)
    (folder / "sglang_triattn" / "__init__.py").write_text(f'__version__ = "{version}"\n')
    (folder / "sglang_triattn" / "cli" / "main.py").write_text("def main():\n    print(__file__)\n")
    pyproject = (folder / "pyproject.toml").read_text()
    assert "\ntriattention = " in pyproject
    (folder / "pyproject.toml").write_text(pyproject.replace("\ntriattention = ", f'\n"triattention {version}" = '))
    return folder


@pytest.fixture
def shared(tmp_path, monkeypatch) -> Path:
    """The only environment of a cache: all packages of the one that the tests run in, but not this project."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", "")
    directory = env.shared_directory(ROOT)
    directory.parent.mkdir(parents=True)
    directory.symlink_to(dockerfile.bare_python(tmp_path).parents[1])
    (directory / env.MARKER).touch()
    return directory


def run(*commands: list) -> list[str]:
    """What commands that run at once print."""
    processes = [
        subprocess.Popen(list(map(str, command)), cwd="/", stdout=subprocess.PIPE, text=True) for command in commands
    ]
    outputs = [process.communicate(timeout=300)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return outputs


def test_two_checkouts_at_once(shared, tmp_path):
    """Prevents a test, or a server that a test starts, from running the code of the checkout that was prepared last.

    Three processes prepare at once, two of them the same checkout.
    """
    roots = [clone(tmp_path / version, version) for version in VERSIONS]
    prepare = [[sys.executable, root / "tools" / "env.py"] for root in roots]
    one, other, again = map(Path, run(*prepare, prepare[0]))
    assert one == again != other
    assert not any(path.is_relative_to(root) for path in (one, other) for root in roots)
    probe = tmp_path / "probe.py"
    probe.write_text(PROBE)
    answers = map(json.loads, run([one, probe], [other, probe]))
    for python, root, version, answer in zip((one, other), roots, VERSIONS, answers, strict=True):
        directory = python.parents[1]
        package = root / "sglang_triattn"
        expected = {
            "code": [str(package / "__init__.py"), version],
            "metadata": version,
            "points": {
                f"triattention {version}": str(package / "patches" / "plugin.py"),
                "triattention_cpu": str(package / "patches" / "cpu" / "platform.py"),
            },
            "prefix": str(directory),
            "site": site.getsitepackages([str(directory), str(shared)]),
        }
        assert answer == [expected] * 3
    commands = [[python.with_name("sglang-triattn")] for python in (one, other)]
    assert run(*commands) == [str(root / "sglang_triattn" / "cli" / "main.py") for root in roots]
