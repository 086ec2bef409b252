"""Ways to start SGLang in a process of its own and see how it ends."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass


@dataclass
class Ended:
    code: int
    output: str
    cpu_seconds: float = 0.0
    """CPU seconds of the process and its children, which a busy machine does not change."""

    @property
    def error(self) -> str:
        """The one line that is for the user."""
        lines = [line for line in self.output.splitlines() if line.startswith("sglang-triattn: error: ")]
        assert len(lines) == 1, self.output[-3000:]
        return lines[0].removeprefix("sglang-triattn: error: ")


def run_python(*arguments: str, env: dict[str, str] | None = None, cwd: str | None = None) -> Ended:
    """Runs this Python from an empty folder, offline, until it exits by itself."""
    before = _cpu_seconds_of_children()
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=cwd or folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1", **(env or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
    return Ended(done.returncode, done.stdout, _cpu_seconds_of_children() - before)


def _cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def launch(*arguments: object, **options) -> Ended:
    return run_python("-m", "sglang.launch_server", *map(str, arguments), **options)


# Resolves each command line in a file as launch_server does before it starts any process, and reports how that went.
RESOLVE = """
import contextlib, io, json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
results = []
for case in json.loads(open(sys.argv[1]).read()):
    os.environ.update(case["env"])
    errors, code = io.StringIO(), 0
    with contextlib.redirect_stderr(errors):
        try:
            prepare_server_args(case["argv"]).resolve_once()
        except SystemExit as exit:
            code = exit.code
        except Exception as error:
            errors.write(f"{type(error).__name__}: {error}")
            code = 1
    for name in case["env"]:
        del os.environ[name]
    results.append({"code": code, "output": errors.getvalue()})
print("RESULTS" + json.dumps(results))
"""
