"""Servers that start in seconds: what they import is imported once, and processes are forked from there.

A server is three processes, each of which imports torch, transformers, SGLang and more for ten seconds. One forkserver
per test process has already done that, up to where a process of SGLang loads plugins, see `forkserver`: plugins and
hooks load as in `python -m sglang.launch_server`. The processes are also related as there: the server leads a session,
and what it spawns are its children.

Servers that are not started here start in the usual way: tests/server/test_readme_clients.py, test_refusals.py.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path

import run_router
import server
from harness import ON_GPU, STRICT, python_path
from launches import RESOLVE, Ended

LARGEST_ANSWER = 1 << 12
LONGEST_RUN_S = 300


class Forkserver:
    """This process's forkserver; it ends with this process."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        """env: for packages that read it on import, and for all that is started here, added to its own."""
        # What is imported into this process later writes defaults of its own to its environment.
        self._given = server.environment(env)
        self._process = None
        if ON_GPU:
            return
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", str(Path(__file__).with_name("forkserver.py")), str(theirs.fileno())]
        self._process = subprocess.Popen(command, env=self._given, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, command: Sequence[str], env: dict[str, str], folder: str, log: int) -> Process | subprocess.Popen:
        """Runs `command`, the words after `python -m`, from `folder` as leader of a session, with output to `log`.

        Its environment is the one that this process had when the forkserver began, with `env`. On a GPU it is a new
        interpreter: CUDA does not work in a fork of a process that has looked for devices.
        """
        if ON_GPU:
            return subprocess.Popen(
                [sys.executable, "-m", *command],
                env={**self._given, **env},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        answer = self.ask({"command": list(command), "env": {**self._given, **env}, "folder": folder}, log)
        if isinstance(answer, str):
            raise ValueError(answer)
        return Process(self, answer)

    def ask(self, request: dict, *files: int) -> int | str | None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        answer = self._socket.recv(LARGEST_ANSWER)
        if not answer:
            raise RuntimeError(f"the forkserver ended with {self._process.wait()}, see its error above")
        return json.loads(answer)

    def stop(self) -> None:
        if self._process is not None:
            self._socket.close()
            self._process.wait()


class Process:
    """A child of the forkserver, with the part of `subprocess.Popen` that is used here."""

    def __init__(self, forkserver: Forkserver, pid: int) -> None:
        self._forkserver, self.pid, self.returncode = forkserver, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forkserver.ask({"pid": self.pid})
        return self.returncode

    def wait(self) -> int:
        """Call only after the process has been killed."""
        while self.poll() is None:
            time.sleep(0.01)
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


@contextmanager
def running_process(forkserver: Forkserver, command: Sequence[str], env: dict[str, str], log_path: Path):
    """The Process of `command`, see `Forkserver.start`. Its session is killed at the end: it has nothing to finish."""
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder:
        with log_path.open("w") as log:
            process = forkserver.start(command, env, folder, log.fileno())
        try:
            yield process
        finally:
            server.stop_process(process, grace_s=0)


@contextmanager
def running_server(forkserver: Forkserver, model: Path, args: Sequence[str], env: dict[str, str], log_path: Path):
    """Like `server.running_server`."""
    port = server.free_port()
    command = server.launch_command(model, port, args)
    with running_launch(forkserver, command[command.index("-m") + 1 :], port, env, log_path) as running:
        yield running


@contextmanager
def running_launch(forkserver: Forkserver, command: Sequence[str], port: int, env: dict[str, str], log_path: Path):
    """A healthy server started by `command`, which makes it listen at `port`."""
    with running_process(forkserver, command, env, log_path) as process:
        running = server.Server(process, port, log_path)
        server.wait_until_healthy(running)
        yield running


@contextmanager
def running_router(
    forkserver: Forkserver, urls: Sequence[str], log_path: Path, *args: str, servers: Sequence[str] = ()
):
    """Like `run_router.running_router`, whose start imports as much as a server's."""
    port = server.free_port()
    command = run_router.router_command(urls, port, *args, servers=servers)
    # An environment of servers, so that it takes their image.
    with running_process(forkserver, command, STRICT, log_path) as process:
        running = server.Server(process, port, log_path)
        run_router.wait_for_workers(running, urls)
        yield running


def run_script(forkserver: Forkserver, script: Path, arguments: Sequence[str], env: dict[str, str]) -> Ended:
    """Runs a Python file until it exits by itself."""
    env = {**env, "PYTHONPATH": python_path(script.parent)}
    return run_module(forkserver, [script.stem, *arguments], env, script.with_suffix(".log"))


def resolve(
    forkserver: Forkserver, folder: Path, cases: Sequence[tuple[Sequence[object], dict[str, str]]]
) -> list[Ended]:
    """Outcomes of resolving each (command line, environment), one after another in one process; `folder` is for its
    script, its input and its log."""
    script, given = folder / "resolve_each.py", folder / "cases.json"
    script.write_text(RESOLVE)
    given.write_text(json.dumps([{"argv": [str(word) for word in argv], "env": env} for argv, env in cases]))
    ended = run_script(forkserver, script, [str(given)], {})
    line = next((line for line in ended.output.splitlines() if line.startswith("RESULTS")), None)
    assert line is not None, ended.output[-3000:]
    return [Ended(result["code"], result["output"]) for result in json.loads(line.removeprefix("RESULTS"))]


# What the installed command runs.
COMMAND = """
import sys
from sglang_triattn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
"""


def run_command(forkserver: Forkserver, folder: Path, arguments: Sequence[object], env: dict[str, str]) -> Ended:
    """Runs `sglang-triattn` with these arguments until it exits by itself; `folder` is for its script and log."""
    script = folder / "command.py"
    script.write_text(COMMAND)
    return run_script(forkserver, script, [str(word) for word in arguments], env)


def run_module(forkserver: Forkserver, command: Sequence[object], env: dict[str, str], log_path: Path) -> Ended:
    """Runs `command`, see `Forkserver.start`, until it exits by itself."""
    with running_process(forkserver, [str(word) for word in command], env, log_path) as process:
        deadline = time.monotonic() + LONGEST_RUN_S
        while process.poll() is None:
            assert time.monotonic() < deadline, f"{command[0]} does not end:\n{log_path.read_text()[-3000:]}"
            time.sleep(0.05)
    return Ended(process.returncode, log_path.read_text())
