"""Ways to start SGLang in a process of its own and see how it ends."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
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


# Resolves each command line as launch_server does before it starts any process, and reports how that went. One process
# for all of them, because importing SGLang takes longer than resolving.
_RESOLVE = """
import contextlib, io, json, os, sys
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import prepare_server_args
load_plugins()
results = []
for case in json.loads(sys.stdin.read()):
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


def resolve(cases: Sequence[tuple[Sequence[object], dict[str, str]]]) -> list[Ended]:
    """Outcomes of resolving each (command line, environment)."""
    request = [{"argv": [str(word) for word in argv], "env": env} for argv, env in cases]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _RESOLVE],
            cwd=folder,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=300,
        )
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULTS")), None)
    assert line is not None, done.stderr[-3000:]
    return [Ended(result["code"], result["output"]) for result in json.loads(line.removeprefix("RESULTS"))]
