"""The SGLang side: the only code that imports sglang.srt, one file for each part of SGLang that it touches.

`activate` is the entry point in the group `sglang.srt.plugins`; SGLang calls it once in each of its processes. Without
--enable-triattention, only the three hooks that define and read settings are in place, in the main process; on one of
several nodes also those by which it learns that another compresses.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# SGLang functions that load plugins in a child process, by the role of that process.
_SCHEDULER = "run_scheduler_process"
_CONTROLLER = "run_data_parallel_controller_process"
_DETOKENIZER = "run_detokenizer_process"


def activate() -> None:
    """Registers the hooks that this process needs.

    Raises:
        TriAttentionError: SGLang is not the version that the hooks were written for, or lacks one of their targets.
            SGLang logs the error; the launch then fails because the flags are unknown or the handshake is missing.
        SystemExit: the same, in a launch that would go on without compression.
    """
    caller = _caller()
    if caller is None:
        _activate_main()
        return
    role, server_args = caller
    if role == _DETOKENIZER:
        return
    from sglang_triattn.patches.hooks import registry
    from sglang_triattn.patches.launch import handshake
    from sglang_triattn.patches.launch import server_args as args_patch
    from sglang_triattn.patches.launch.nodes import nodes_of

    calibration = args_patch.calibration_of(server_args)
    if calibration is not None:
        from sglang_triattn.patches.calibration.engine import scheduler_hooks

        registry.register(scheduler_hooks(calibration))
        return
    rules = args_patch.rules_of(server_args)
    if rules is None:
        args_patch.exit_if_forgotten()
        if nodes_of(server_args) is None:
            return
    if role == _CONTROLLER:
        registry.register(handshake.controller_hooks())
        return
    if rules is None:
        from sglang_triattn.patches.launch.same_launch import PlainRank

        registry.register(PlainRank().hooks())
        return
    from sglang_triattn.patches.compression import Compression

    registry.register(Compression(rules).hooks())


def _activate_main() -> None:
    from sglang_triattn.patches.hooks import registry
    from sglang_triattn.patches.launch import server_args as args_patch

    engine = sys.modules.get("sglang.srt.entrypoints.engine")
    try:
        if engine is not None:
            # Assigned, not hooked: SGLang's registry would replace the class everywhere it is known, and records could
            # then not be pickled to the schedulers.
            engine.Engine.server_args_class = args_patch.engine_arguments(
                engine.Engine.server_args_class, _enable_main, _watch_nodes
            )
        registry.register(args_patch.hooks(_enable_main, _enable_resolved, _watch_nodes))
    except Exception as error:
        args_patch.exit_if_asked_for(error)
        raise


def _enable_main(server_args: ServerArgs) -> None:
    """Called in the main process once a launch enables compression."""
    from sglang_triattn.patches.launch import checks as launch

    launch.check_files(server_args)
    # These import SGLang's server.
    from sglang_triattn.patches import grpc_servicer, request_validation
    from sglang_triattn.patches.hooks import registry
    from sglang_triattn.patches.launch import handshake
    from sglang_triattn.patches.observability import reporting, stopped

    launch.check_at_resolution()
    if grpc_servicer.is_grpc(server_args):
        grpc_servicer.check_implementation()
        registry.install(grpc_servicer.main_hooks())
        return
    registry.install([*handshake.main_hooks(), *reporting.main_hooks(), *request_validation.main_hooks()])
    stopped.watch_health()
    request_validation.check_headers()


def _enable_resolved(server_args: ServerArgs) -> None:
    """The same for settings that SGLang has resolved already."""
    from sglang_triattn.patches.launch import checks as launch

    _enable_main(server_args)
    launch.check_resolved(server_args)


def _watch_nodes(_: ServerArgs) -> None:
    """Called in the main process of one of several nodes, for a launch that does not compress."""
    from sglang_triattn.patches.hooks import registry
    from sglang_triattn.patches.launch import handshake

    registry.install(handshake.main_hooks())


def _caller() -> tuple[str, ServerArgs] | None:
    """The SGLang process function that called, and its `server_args`; None in the main process.

    They are read from the stack: `load_plugins` passes nothing on, and SGLang has published neither at that time.
    """
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_name
        if name in (_SCHEDULER, _CONTROLLER, _DETOKENIZER):
            return name, cast("ServerArgs", frame.f_locals.get("server_args"))
        frame = frame.f_back
    return None
