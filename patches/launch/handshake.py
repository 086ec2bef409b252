"""The launch succeeds only if every scheduler confirms that it compresses.

SGLang parts: `Scheduler.get_init_info` (sglang/srt/managers/scheduler.py), by which a scheduler reports
to the main process that it is ready; `DataParallelController` (data_parallel_controller.py), between the two if there
are several replicas; `_wait_for_scheduler_ready` (sglang/srt/entrypoints/engine.py), where the main process collects
the answers.

A scheduler that cannot compress (wrong statistics for its model, an unsupported KV pool, a hook that did not apply)
says why in its answer instead of raising: an exception there would reach the user as a traceback from a child process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import psutil

from sglang_triattn import __version__
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.nodes import Listener, ListeningReader, nodes_of

if TYPE_CHECKING:
    from sglang.srt.managers.data_parallel_controller import DataParallelController

KEY = "triattention"

# Attribute of a DataParallelController.
_REFUSAL = "_triattention_refusal"

# What a refused launch had built in the main process; see `stop_launch`.
_abandoned: list[dict[str, object]] = []


def answer(refusal: str | None) -> dict[str, str | None]:
    """A scheduler's answer: its plugin version, and why it refuses (None if it compresses)."""
    return {"version": __version__, "refusal": refusal}


def answer_hook(refusal: Callable[[], str | None], why: str) -> Hook:
    """Makes a scheduler answer the launch; `refusal` returns why it refuses, or None."""

    def answered(info: dict, _: object) -> dict:
        return {**info, KEY: answer(refusal())}

    return Hook("sglang.srt.managers.scheduler.Scheduler.get_init_info", "after", answered, "self", why=why)


def check_answers(infos: list[dict[str, Any]]) -> None:
    """Raises TriAttentionError unless every scheduler's answer says that it compresses.

    Args:
        infos: the init info of each scheduler, or of the data-parallel controller in front of them.
    """
    for info in infos:
        confirmation = info.get(KEY)
        if confirmation is None or confirmation["version"] != __version__:
            raise TriAttentionError(
                f"A scheduler process did not confirm that sglang-triattn {__version__} is active in it, so the "
                "server would run without compression: see the log above for a plugin that failed to load there, "
                "and start the server from a folder that holds no folder named sglang_triattn."
            )
        if confirmation["refusal"] is not None:
            raise TriAttentionError(confirmation["refusal"])


class CheckedPipes:
    """`multiprocessing` for a launch that opens a pipe for each scheduler: their answers are checked as they are read.

    `recv` of such a pipe raises TriAttentionError if a scheduler is ready and does not compress.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def Pipe(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        reader, writer = self._module.Pipe(*args, **kwargs)
        return _CheckedReader(reader), writer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _CheckedReader:
    def __init__(self, reader: Any) -> None:
        self._reader = reader

    def recv(self) -> dict[str, Any]:
        info = self._reader.recv()
        if info.get("status") == "ready":
            check_answers([info])
        return info

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    return [
        Hook(
            "sglang.srt.entrypoints.engine._wait_for_scheduler_ready",
            "around",
            _wait_for_schedulers,
            "scheduler_pipe_readers scheduler_procs",
            why="ends a launch in which a scheduler, or another node, does not compress",
        )
    ]


def controller_hooks() -> list[Hook]:
    """Hooks for the data-parallel controller process."""
    target = "sglang.srt.managers.data_parallel_controller.DataParallelController"
    return [
        Hook(
            f"{target}._record_scheduler_init_infos",
            "after",
            _on_replicas_ready,
            "self infos",
            why="reads the replicas' answers",
        ),
        Hook(
            f"{target}.get_init_info",
            "after",
            _on_controller_info,
            "self",
            why="passes the replicas' answers on to the main process",
        ),
    ]


def _on_replicas_ready(_: object, controller: DataParallelController, infos: list[dict[str, Any]]) -> None:
    try:
        check_answers(infos)
    except TriAttentionError as error:
        setattr(controller, _REFUSAL, str(error))


def _on_controller_info(info: dict[str, Any], controller: DataParallelController) -> dict[str, Any]:
    return {**info, KEY: answer(getattr(controller, _REFUSAL, None))}


def _wait_for_schedulers(original: Callable, readers: list, processes: list) -> list[dict[str, Any]]:
    """Waits until they are ready, unless another node of the launch refuses, and checks that they compress."""
    from sglang.srt.runtime_context import get_server_args

    server_args = get_server_args()
    nodes = nodes_of(server_args)
    compresses = args_patch.config_of(server_args) is not None
    if not compresses and nodes is None:
        return original(readers, processes)
    if nodes is not None:
        listener = Listener(nodes)
        readers = [ListeningReader(reader, listener) for reader in readers]
    try:
        infos = original(readers, processes)
        check_answers(infos if compresses else [info for info in infos if KEY in info])
        return infos
    except TriAttentionError as error:
        stop_launch(processes)
        # Ranks of several nodes refuse together.
        args_patch.refuse(server_args, error, others_know=True)


def stop_launch(schedulers: list) -> None:
    """Kills a launch's schedulers and its other SGLang processes, and waits up to 30 s for their end.

    If a launch fails, `sglang.Engine` leaves them running, and holding their memory. The objects that the launch built
    in this process are kept alive: they have sockets to the schedulers, and if Python collected those, ZeroMQ would
    wait for their peers forever.
    """
    _abandoned.append(_locals_of("_launch_subprocesses"))
    alive = [psutil.Process(process.pid) for process in schedulers if process.is_alive()]
    since = min((process.create_time() for process in alive), default=float("inf"))
    others = [
        child
        for child in psutil.Process().children()
        if child.create_time() >= since and _title(child).startswith("sglang::")
    ]
    processes = {process for parent in (*alive, *others) for process in (parent, *parent.children(recursive=True))}
    for process in processes:
        process.kill()
    psutil.wait_procs(processes, timeout=30)


def _locals_of(function: str) -> dict[str, object]:
    """The local variables of the nearest caller with that name."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != function:
        frame = frame.f_back
    return {} if frame is None else dict(frame.f_locals)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
