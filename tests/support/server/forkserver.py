"""The process from which `forked_servers` are forked. It imports nothing from SGLang or this project.

forkserver --forks--> image --forks--> server --forks at once--> preforked processes, which become what it spawns later

An image has imported SGLang, and knows which environment variables that read: it serves every environment with the
same values of these. It is for servers and routers: any other command is forked from the forkserver itself, which has
read variables too. A command that sets one of those to another value is refused.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import math
import os
import runpy
import signal
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import util
from pathlib import Path

# Its folder is not on the path here, and must not be on the servers'.
sys.path.insert(0, os.path.dirname(__file__))
import environment_reads

sys.path.pop(0)

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
# A server spawns a scheduler for each rank, a detokenizer, and a controller of data-parallel ranks. Workers for HTTP
# take what is left of these, and further ones start as new interpreters.
RANKS, MORE_THAN_RANKS, LEAST_PREFORKED = ("--tp-size", "--pp-size"), 2, 4
DATA_PARALLEL, ATTENTION_DATA_PARALLEL = "--dp-size", "--enable-dp-attention"
# What the processes that a server spawns import before they load plugins.
FROM_IMAGES = ("sglang.launch_server", "sglang_router.launch_router")
OF_SERVERS = (
    "sglang.srt.plugins", "sglang.srt.server_args", "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
)  # fmt: skip
# What a server's first process imports in any case, while it loads plugins; hooks replace functions of it afterwards.
OF_ENTRYPOINTS = (
    "sglang.srt.entrypoints.anthropic.serving", "sglang.srt.entrypoints.ollama.serving",
    "sglang.srt.entrypoints.openai.serving_decisions",
    "sglang.srt.entrypoints.openai.serving_responses", "sglang.srt.entrypoints.openai.serving_score",
    "sglang.srt.entrypoints.systemone.serving", "sglang.srt.function_call.function_call_parser",
    "sglang.srt.layers.rotary_embedding", "sglang.srt.weight_cache.daemon",
)  # fmt: skip
# What a scheduler imports for its model runner, whose own module sets up the platform.
OF_RUNNERS = (
    "sglang.srt.debug_utils.dumper", "sglang.srt.kv_canary.api", "sglang.srt.layers.attention.attention_registry",
    "sglang.srt.mem_cache.kv_cache_configurator", "sglang.srt.model_executor.model_runner_components.cuda_graph_setup",
    "sglang.srt.model_executor.model_runner_components.ngram_embedding_manager",
    "sglang.srt.model_executor.model_runner_components.weight_updater", "sglang.srt.model_executor.pool_configurator",
)  # fmt: skip
# What this package imports in a server's first process and in a scheduler, once a launch asks for compression.
OF_COMPRESSION = (
    "sglang_triattn.patches.compression", "sglang_triattn.patches.launch.checks",
    "sglang_triattn.patches.request_validation",
)  # fmt: skip
CONTROLLER, CONTROLLER_WAITS_MS = "sglang.srt.managers.data_parallel_controller", 1000
# Later: the CPU platform replaces what these import by name, and their registry reads which of them to leave out.
MODELS = "sglang.srt.models."
# The least recently used one makes room for a new one; each holds half a gigabyte that its servers share.
KEPT_IMAGES = 2
# Files that a spawned process has from the one that spawned it.
passed: list[int] = []
# Differs for each test, and means nothing to a server.
IGNORED = "PYTEST_CURRENT_TEST"
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.05
LARGEST_MESSAGE = 1 << 20
MOST_FILES = 32
# What an installed package says of itself; an image has looked for this entry point.
ENTRY_POINTS, FOUND_BEFORE = "*.dist-info/entry_points.txt", "sglang.srt.platforms"


@dataclass(frozen=True)
class Image:
    """
    Attributes:
        socket: for requests.
        env: what it was made with.
        names: of the environment variables that it has read.
    """

    socket: socket.socket
    env: dict[str, str]
    names: frozenset[str]


def run_forkserver(ours: socket.socket) -> None:
    """Answers requests until the test process is gone. Returns in each server, ready to run what `sys.argv` says."""
    given = dict(os.environ)
    environment_reads.record()
    for name in PACKAGES:
        importlib.import_module(name)
    names = frozenset(environment_reads.read)
    early = [name for name in sys.modules if name.split(".")[0] in OURS]
    assert not early, f"imported before its time: {early}"
    # Garbage collections in the servers, dozens of them during imports, then skip what exists here.
    gc.freeze()
    # Servers forked from an image become this process's children.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    images: list[Image] = []
    started: set[int] = set()
    ended: dict[int, int] = {}
    while True:
        data, files, *_ = socket.recv_fds(ours, LARGEST_MESSAGE, MOST_FILES)
        if not data:
            reap(ended)
            end_servers(started - set(ended))
            sys.exit()
        request = json.loads(data)
        answer = None
        if "pid" in request:
            reap(ended)
            answer = ended.get(request["pid"])
        else:
            request["env"].pop(IGNORED, None)
            answer = refusal(given, request["env"], names)
            if answer is None and request["command"][0] in FROM_IMAGES:
                image = image_of(request["env"], images)
                if image is None:
                    ours.close()
                    return
                answer = forked_from(image, request, files)
            if answer is None:
                answer = os.fork()
            if answer == 0:
                ours.close()
                become_server(request, files)
                return
            ended.pop(answer, None)
            if isinstance(answer, int):
                started.add(answer)
        for file in files:
            os.close(file)
        ours.send(json.dumps(answer).encode())


def end_servers(servers: set[int]) -> None:
    """Kills what a test process has started and not ended: it was itself killed or interrupted."""
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)


def reap(ended: dict[int, int]) -> None:
    """Adds the exit codes of all children that have ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        ended[pid] = os.waitstatus_to_exitcode(status)


def refusal(given: dict[str, str], wanted: dict[str, str], names: frozenset[str]) -> str | None:
    """Why a command cannot be forked from here, if it cannot; `names` were read under the environment `given`."""
    late = environment_reads.disagreeing(given, wanted, names)
    if late:
        return f"{', '.join(late)} would come too late: what the forkserver imports has read it; give it to Forkserver."
    return None


def image_of(env: dict[str, str], images: list[Image]) -> Image | None:
    """The image for this environment, made if there is none. Returns None in each server of it."""
    found = next((image for image in images if not environment_reads.disagreeing(image.env, env, image.names)), None)
    if found is None:
        while len(images) >= KEPT_IMAGES:
            images.pop(0).socket.close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if not os.fork():
            for other in (ours, *(image.socket for image in images)):
                other.close()
            run_image(env, theirs)
            return None
        theirs.close()
        # Nothing if it has ended: SGLang may not even be importable.
        names = json.loads(ours.recv(LARGEST_MESSAGE) or b"[]")
        found = Image(ours, env, frozenset(names))
    else:
        images.remove(found)
    images.append(found)
    return found


def run_image(env: dict[str, str], theirs: socket.socket) -> None:
    """Answers requests for servers until the forkserver closes the socket. Returns in each server."""
    # Without what its first server alone has on its path.
    adopt_environment({**env, "PYTHONPATH": ""}, "/")
    environment_reads.read.clear()
    for name in (*OF_SERVERS, *OF_ENTRYPOINTS, *OF_RUNNERS, *OF_COMPRESSION):
        importlib.import_module(name)
    let_controllers_wait()
    early = [name for name in sys.modules if name.startswith(MODELS)]
    assert not early, f"imported before its time: {early}"
    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.freeze()
    theirs.send(json.dumps(sorted(environment_reads.read)).encode())
    while True:
        data, files, *_ = socket.recv_fds(theirs, LARGEST_MESSAGE, MOST_FILES)
        if not data:
            os._exit(0)
        pid = fork_orphan()
        if not pid:
            theirs.close()
            become_server(json.loads(data), files)
            return
        for file in files:
            os.close(file)
        theirs.send(json.dumps(pid).encode())


def let_controllers_wait() -> None:
    """Keeps controllers of data-parallel ranks from asking for requests without a pause, as a third busy process."""
    controller = importlib.import_module(CONTROLLER)
    receive = controller.sock_recv

    def wait_and_receive(socket, flags=0):
        socket.poll(CONTROLLER_WAITS_MS)
        return receive(socket, flags)

    controller.sock_recv = wait_and_receive


def forked_from(image: Image, request: dict, files: list[int]) -> int | None:
    """Process id of the server that the image forked, or None if it has ended."""
    try:
        socket.send_fds(image.socket, [json.dumps(request).encode()], files)
        return json.loads(image.socket.recv(LARGEST_MESSAGE) or b"null")
    except OSError:
        return None


def fork_orphan() -> int:
    """As `os.fork`, but the new process becomes a child of the forkserver."""
    reader, writer = os.pipe()
    between = os.fork()
    if between:
        os.close(writer)
        os.waitpid(between, 0)
        pid = int(os.read(reader, 32))
        os.close(reader)
        return pid
    pid = os.fork()
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(reader)
    os.close(writer)
    return 0


def become_server(request: dict, files: list[int]) -> None:
    os.setsid()
    for number in (1, 2):
        os.dup2(files[0], number)
    os.close(files[0])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv = request["command"]
    environment_reads.stop()
    adopt_environment(request["env"], request["folder"])


def adopt_environment(env: dict[str, str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    new = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    for path in new:
        assert_nothing_comes_late(Path(path))
    sys.path[:0] = new


def assert_nothing_comes_late(folder: Path) -> None:
    """Prevents a folder of the path from holding what was imported, or looked for, without it."""
    hidden = {path.name.split(".")[0] for path in folder.glob("*")} & sys.modules.keys()
    assert not hidden, f"{folder} has other modules than those imported as {sorted(hidden)}"
    late = [file for file in folder.glob(ENTRY_POINTS) if FOUND_BEFORE in file.read_text()]
    assert not late or OURS[0] not in sys.modules, f"{late} come after SGLang has looked for its platform"


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
    # By these, this process's parent and its child notice the other's end.
    while passed:
        os.close(passed.pop())
    data, files, *_ = socket.recv_fds(theirs, LARGEST_MESSAGE, MOST_FILES)
    if not data:
        os._exit(0)
    theirs.close()
    request = json.loads(data)
    passed.extend(request["numbers"])
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


def prefork_all() -> str | None:
    """Preforks what this process will spawn. Returns None, and in each new process, when it is needed, what to run."""
    ranks = math.prod(int(sys.argv[sys.argv.index(flag) + 1]) for flag in RANKS if flag in sys.argv)
    preforked: list[tuple[int, socket.socket]] = []
    for _ in range(max(LEAST_PREFORKED, ranks + MORE_THAN_RANKS)):
        code = prefork(preforked)
        if code is not None:
            return code
    spawn_from(preforked)
    return None


def poll_sooner() -> None:
    """Lets this process, a server's first, wait a twentieth of a second wherever SGLang waits a whole one.

    It does so before it asks whether the server that it has just started answers.
    """
    sleep = time.sleep
    time.sleep = lambda seconds: sleep(POLL_S if seconds == 1 else seconds)


def main() -> None:
    run_forkserver(socket.socket(fileno=int(sys.argv[1])))
    # The controller of data-parallel ranks, which the server spawns, spawns those that do not share their attention.
    has_controller = DATA_PARALLEL in sys.argv and ATTENTION_DATA_PARALLEL not in sys.argv
    code = prefork_all()
    if code is None:
        poll_sooner()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    if has_controller:
        code = prefork_all() or code
    exec(code, {})


if __name__ == "__main__":
    main()
