"""The process from which the tests' servers are forked, see `warm`. Imports nothing from this project.

forkserver --forks--> server --forks at once--> preforked processes, which become what it spawns later
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from multiprocessing import util

# The packages that SGLang's modules take longest to import.
PACKAGES = (
    "torch", "torch._dynamo.repro.after_dynamo", "torch._inductor.compile_fx", "transformers.activations",
    "transformers.modeling_gguf_pytorch_utils", "transformers.modeling_layers", "flashinfer", "triton_kernels.tensor",
    "transformers.models.auto.processing_auto", "transformers.models.llava.modeling_llava",
    "transformers.models.mllama.modeling_mllama", "transformers.models.parakeet.modeling_parakeet",
    "transformers.models.pixtral.modeling_pixtral", "transformers.models.whisper.modeling_whisper",
    "compressed_tensors.config", "gguf", "openai.types.realtime", "openai.types.responses", "fastapi", "aiohttp",
    "xgrammar", "timm", "quack", "torchcodec", "IPython", "uvicorn", "uvloop", "watchfiles", "lxml.etree",
)  # fmt: skip
OURS = ("sglang", "sglang_triattn")
# Schedulers of two ranks and a detokenizer; a server that spawns more starts the rest as new interpreters.
PREFORKED = 3
LARGEST_MESSAGE = 1 << 20
MOST_FILES = 32


def run_forkserver(ours: socket.socket) -> None:
    """Answers requests until the test process is gone. Returns in each server, ready to run what `sys.argv` says."""
    for name in PACKAGES:
        importlib.import_module(name)
    early = [name for name in sys.modules if name.split(".")[0] in OURS]
    assert not early, f"imported before its time: {early}"
    # Garbage collections in the servers, dozens of them during imports, then skip what exists here.
    gc.freeze()
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


def prefork(preforked: list[tuple[int, socket.socket]]) -> str | None:
    """Adds a process to `preforked`. Returns twice: None at once, and in the new process, when it is needed, what to
    run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    pid = os.fork()
    if pid:
        theirs.close()
        preforked.append((pid, ours))
        return None
    for other in (ours, *(other for _, other in preforked)):
        other.close()
    data, files, *_ = socket.recv_fds(theirs, LARGEST_MESSAGE, MOST_FILES)
    if not data:
        os._exit(0)
    theirs.close()
    request = json.loads(data)
    # Moved out of the way first: a wanted number may be one of these.
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


def spawn_from(preforked: list[tuple[int, socket.socket]]) -> None:
    """Makes `multiprocessing` take a preforked process instead of a new interpreter, while there is one."""
    spawn = util.spawnv_passfds

    def spawn_warm(path: bytes, arguments: Sequence[str], files: Sequence[int]) -> int:
        if not preforked or "--multiprocessing-fork" not in arguments:
            return spawn(path, arguments, files)
        pid, ours = preforked.pop(0)
        numbers = sorted(files)
        words = [os.fsdecode(word) for word in arguments]
        request = {"arguments": words, "env": dict(os.environ), "folder": os.getcwd(), "numbers": numbers}
        socket.send_fds(ours, [json.dumps(request).encode()], numbers)
        ours.close()
        return pid

    util.spawnv_passfds = spawn_warm


def main() -> None:
    run_forkserver(socket.socket(fileno=int(sys.argv[1])))
    preforked: list[tuple[int, socket.socket]] = []
    for _ in range(PREFORKED):
        code = prefork(preforked)
        if code is not None:
            exec(code, {})
            return
    spawn_from(preforked)
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
