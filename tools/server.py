"""Start and stop an SGLang server as a child process, for `make demo`, `make serve` and the server tests.

Imports only the standard library. The server runs offline, with the python that imports this module, from a new
temporary folder unless the caller names one.
"""

import fcntl
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

START_TIMEOUT_S = 600
# An idle SGLang exits within three seconds; a busy one first finishes its work, which is not worth the wait.
STOP_GRACE_S = 6
KILL_TIMEOUT_S = 30
# What uvicorn logs; and SGLang, of one of its own ports, before it ends.
TAKEN = "error while attempting to bind on address"
OTHER_TAKEN = " is not available in 30 seconds. "

# With attention data parallelism SGLang also listens 13 and 233 to 239 above a server's port: none of those is here.
PORTS = [port for port in range(20_000, 30_000) if port % 50 <= 10]
_claimed = []

# SGLang's own checks of its books, as variables of a server's environment: they end the scheduler at the first slot or
# row that is lost, owned twice or freed twice.
MEMORY_CHECKS = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_DEBUG_MEMORY_POOL": "1",
}


class ServerError(RuntimeError):
    """The server did not come up; the message is for the user."""


class PortTaken(ServerError):
    """Another program took a port after it was drawn. Of the server's own, SGLang only logs that and goes on."""


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    log_path: Path | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self.process.pid

    def log_text(self) -> str:
        return "" if self.log_path is None else self.log_path.read_text(errors="replace")

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log_text().splitlines()[-lines:])


def free_port() -> int:
    """A free port that this process holds until it ends: a server binds it seconds later.

    It is below those that the system assigns to connections.
    """
    while not port_is_free(port := secrets.choice(PORTS)) or not _claim(port):
        pass
    return port


def _claim(port: int) -> bool:
    """Whether no other process has drawn this port; the lock goes with this process."""
    file = (Path(tempfile.gettempdir()) / f"sglang-triattn-port-{port}").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return False
    _claimed.append(file)
    return True


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server itself does: lingering connections of an earlier server do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def launch_command(model: str | Path, port: int, args: Sequence[str] = ()) -> list[str]:
    """`args` come last: if an option is given twice, the server uses the last."""
    address = ["--host", "127.0.0.1", "--port", str(port)]
    return [
        sys.executable,
        "-m",
        "sglang.launch_server",
        "--model-path",
        str(model),
        *address,
        *map(str, args),
    ]


def session_members(session: int) -> list[int]:
    """Living processes of a session; zombies that are not reaped yet do not count."""
    members = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name, in parentheses, may contain spaces; state, parent, group and session follow it.
            state, _, _, owner = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(owner) == session and state != "Z":
            members.append(int(stat.parent.name))
    return members


def stop_process(process: subprocess.Popen, grace_s: float = STOP_GRACE_S) -> None:
    """Ends every process of the session that `process` leads and returns when they are gone."""
    # Only the leader is asked: SGLang mistakes a child that exits on its own for a crash and then waits seconds.
    if process.poll() is None:
        process.terminate()
        _wait_until_gone(process, grace_s)
    for pid in session_members(process.pid):
        # It may have exited since it was listed.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    if not _wait_until_gone(process, KILL_TIMEOUT_S):
        raise ServerError(f"processes {session_members(process.pid)} of the server do not end.")
    process.wait()


def _wait_until_gone(process: subprocess.Popen, timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while session_members(process.pid):
        if time.monotonic() > deadline:
            return False
        process.poll()
        time.sleep(0.05)
    return True


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=30) as response:
            return response.status == 200
    except (urllib.error.URLError, OSError):
        return False


def wait_until_healthy(server: Server, timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        code = server.process.poll()
        if code is not None:
            kind = PortTaken if OTHER_TAKEN in server.log_text() else ServerError
            raise kind(_with_log(server, f"the server ended while starting, with exit code {code}"))
        if TAKEN in server.log_text():
            raise PortTaken(_with_log(server, f"another program has port {server.port}"))
        if is_healthy(server.url):
            return
        time.sleep(0.1)
    raise ServerError(_with_log(server, f"the server was not healthy within {timeout_s:.0f} s"))


def _with_log(server: Server, sentence: str) -> str:
    if server.log_path is None:
        return f"{sentence}."
    return f"{server.log_tail()}\n{sentence}; its last lines are above, the whole log is {server.log_path}."


def environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """This process's environment, offline, updated with `env`."""
    return {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **(env or {})}


@contextmanager
def running_process(
    command: Sequence[str],
    port: int,
    env: dict | None = None,
    log_path: str | Path | None = None,
    folder: Path | None = None,
):
    """Runs `command` as the leader of a new session and stops the whole session at the end.

    It runs in `folder`, by default a new temporary one.
    """
    if log_path is not None:
        log_path = Path(log_path)
        log_path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="sglang-triattn-") as empty:
        with log_path.open("w") if log_path else nullcontext() as output:
            process = subprocess.Popen(
                command,
                cwd=folder or empty,
                env=environment(env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield Server(process, port, log_path)
        finally:
            stop_process(process)


@contextmanager
def running_server(
    model: str | Path,
    args: Sequence[str] = (),
    env: dict | None = None,
    log_path: str | Path | None = None,
    port: int | None = None,
    timeout_s: float = START_TIMEOUT_S,
    folder: Path | None = None,
):
    """A healthy server of `model`, see `running_process`; without `log_path`, its output goes to this process's."""
    port = port or free_port()
    with running_process(launch_command(model, port, args), port, env, log_path, folder) as server:
        wait_until_healthy(server, timeout_s)
        yield server


def triattention_args(stats: str | Path) -> list[str]:
    """Arguments of `make demo` and `make serve`: the budget is small enough to be outgrown within seconds on a CPU."""
    args = ["--enable-triattention", "--triattention-stats", str(stats)]
    args += ["--triattention-budget", "256", "--triattention-interval", "64", "--triattention-recent", "64"]
    # The pool's size is given because SGLang would otherwise take most of the machine's memory.
    return [*args, "--max-total-tokens", "8192"]


def exit_on_signals() -> None:
    """Makes SIGTERM and SIGHUP unwind this process like Ctrl-C, so that no server keeps running."""

    def leave(number, _frame):
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
