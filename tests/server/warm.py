"""Servers that start in seconds: the packages that SGLang stands on are imported once, and processes forked from there.

A server is three processes, each of which imports torch, transformers, FlashInfer and more for ten seconds. A nursery,
one for each test process, has done that once. It has imported neither SGLang nor this package: each process of a server
does that itself, in its usual order, so that plugins and hooks come as they do in `python -m sglang.launch_server`.
The processes are related as there, too: the server leads a session, and what it spawns are its children.

    test process --asks--> nursery --forks--> server --forks at once--> spares, which become what it spawns later

What is not started here starts in the usual way: tests/server/test_entrances.py, test_refusals.py, the benchmarks.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path

# What SGLang's modules import for longest.
PACKAGES = (
    "torch", "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "transformers.activations",
    "transformers.modeling_gguf_pytorch_utils", "transformers.modeling_layers", "flashinfer", "triton_kernels.tensor",
    "compressed_tensors.config", "gguf", "openai.types.realtime", "openai.types.responses", "fastapi", "aiohttp",
)  # fmt: skip
OURS = ("sglang", "sglang_triattn")
# A scheduler and a detokenizer; a server that spawns more starts the others as new interpreters.
SPARES = 2
LARGEST_MESSAGE = 1 << 20
MOST_FILES = 32


class Nursery:
    """The nursery of this process. Ends with it."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        self._process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        theirs.close()

    def start(self, command: Sequence[str], env: dict[str, str], folder: str, log: int) -> Process:
        """A process that leads a session and runs `command`, words behind `python -m`, from `folder` into `log`."""
        return Process(self, self.ask({"command": list(command), "env": env, "folder": folder}, log))

    def ask(self, request: dict, *files: int) -> int | None:
        socket.send_fds(self._socket, [json.dumps(request).encode()], files)
        return json.loads(self._socket.recv(LARGEST_MESSAGE))

    def stop(self) -> None:
        self._socket.close()
        self._process.wait()


class Process:
    """A child of the nursery, as far as `subprocess.Popen` is used of it here."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery, self.pid, self.returncode = nursery, pid, None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._nursery.ask({"pid": self.pid})
        return self.returncode

    def wait(self) -> int:
        """To be called once the process has been killed."""
        while self.poll() is None:
            select.select([], [], [], 0.01)
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def run_nursery(ours: socket.socket) -> None:
    """Answers requests until the test process is gone. Returns in each server, ready to run as `sys.argv` says."""
    for name in PACKAGES:
        importlib.import_module(name)
    early = [name for name in sys.modules if name.split(".")[0] in OURS]
    assert not early, f"imported before its time: {early}"
    while True:
        data, files, *_ = socket.recv_fds(ours, LARGEST_MESSAGE, MOST_FILES)
        if not data:
            sys.exit()
        request = json.loads(data)
        answer = exit_code(request["pid"]) if "pid" in request else os.fork()
        if answer == 0 and "command" in request:
            ours.close()
            become_server(request, files)
            return
        for file in files:
            os.close(file)
        ours.send(json.dumps(answer).encode())


def exit_code(pid: int) -> int | None:
    ended, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def become_server(request: dict, files: list[int]) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(files[0], number)
    os.close(files[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = request["command"]
    adopt_environment(request["env"], request["folder"])


def adopt_environment(env: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    sys.path[:0] = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]


def fork_spare(spares: list[tuple[int, socket.socket]]) -> str | None:
    """Adds a spare to `spares`. Returns twice: at once None, and in the spare, when its time has come, what to run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        spares.append((pid, ours))
        return None
    for other in (ours, *(other for _, other in spares)):
        other.close()
    data, files, *_ = socket.recv_fds(theirs, LARGEST_MESSAGE, MOST_FILES)
    if not data:
        os._exit(0)
    theirs.close()
    request = json.loads(data)
    # Out of the way first: a number that is wanted may be one of these.
    free = max(*files, *request["numbers"]) + 1
    for number, file in enumerate(files):
        os.dup2(file, free + number)
        os.close(file)
    for number, wanted in enumerate(request["numbers"]):
        os.dup2(free + number, wanted, inheritable=False)
        os.close(free + number)
    adopt_environment(request["env"], request["folder"])
    # python -c CODE --multiprocessing-fork ...
    code = request["arguments"].index("-c") + 1
    sys.argv = ["-c", *request["arguments"][code + 1 :]]
    return request["arguments"][code]


def spawn_from(spares: list[tuple[int, socket.socket]]) -> None:
    """Lets `multiprocessing` take a spare instead of a new interpreter, while there is one."""
    spawn = util.spawnv_passfds

    def spawn_warm(path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
        if not spares or "--multiprocessing-fork" not in arguments:
            return spawn(path, arguments, files)
        pid, ours = spares.pop(0)
        numbers = sorted(files)
        words = [os.fsdecode(word) for word in arguments]
        request = {"arguments": words, "env": dict(os.environ), "folder": os.getcwd(), "numbers": numbers}
        socket.send_fds(ours, [json.dumps(request).encode()], numbers)
        ours.close()
        return pid

    util.spawnv_passfds = spawn_warm


def main() -> None:
    run_nursery(socket.socket(fileno=int(sys.argv[1])))
    spares: list[tuple[int, socket.socket]] = []
    for _ in range(SPARES):
        code = fork_spare(spares)
        if code is not None:
            exec(code, {})
            return
    spawn_from(spares)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


@contextmanager
def running_server(nursery: Nursery, model: Path, args: Sequence[str], env: dict[str, str], log_path: Path):
    """As `server.running_server`. At the end its processes are killed, which have nothing to finish."""
    import server

    port = server.free_port()
    command = server.launch_command(model, port, args)
    command = command[command.index("-m") + 1 :]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **env}
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as folder:
        with log_path.open("w") as log:
            process = nursery.start(command, environment, folder, log.fileno())
        running = server.Server(process, port, log_path)
        try:
            server.wait_until_healthy(running)
            yield running
        finally:
            server.stop_process(process, grace_s=0)


if __name__ == "__main__":
    main()
