"""SMG's gRPC server (`--smg-grpc-mode`), whose main process has neither TokenizerManager nor HTTP endpoints.

Parts of smg-grpc-servicer, a package that SGLang requires: `_start_scheduler_processes` (scheduler_launcher.py), which
waits for the schedulers; `SGLangSchedulerServicer._convert_generate_request` (servicer.py), which every request passes
through; `GrpcRequestManager._handle_batch_output` (request_manager.py), to which schedulers send their answers;
`SGLangHealthServicer.engine_status` (health_servicer.py) and `await_probe` (servicer.py), by which it answers
health checks.

Its schedulers are those of SGLang and load this package. Its answers have no field for a report, which therefore comes
as trailing metadata of the call.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook, replaced
from sglang_triattn.patches.launch import server_args as args_patch
from sglang_triattn.patches.launch.handshake import CheckedPipes
from sglang_triattn.patches.launch.preferred import read_preferred, with_preferred
from sglang_triattn.patches.observability import reporting, stopped
from sglang_triattn.patches.request.fields import kinds_of
from sglang_triattn.patches.request_validation import check_settings

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import BatchTokenIDOutput, TokenizedGenerateReqInput
    from sglang.srt.server_args import PortArgs, ServerArgs

METADATA = "triattention"
"""The key of the trailing metadata of a call of `Generate`: the report of its last answer, as JSON."""
IMPLEMENTATION = "SMG_SGLANG_SERVICER_IMPL"
_PACKAGE = "smg_grpc_servicer.sglang"


def is_grpc(server_args: Any) -> bool:
    """Whether a launch serves gRPC by SMG's server in place of HTTP."""
    return bool(server_args.smg_grpc_mode or server_args.grpc_mode)


def check_implementation() -> None:
    """Raises TriAttentionError if the server is the one in Rust, which `--servicer-impl` chooses by the environment."""
    if os.environ.get(IMPLEMENTATION) == "rust":
        raise TriAttentionError(
            "--servicer-impl rust does not work with --enable-triattention, because it is not tested with requests "
            f"that bring settings: use --servicer-impl python, or unset {IMPLEMENTATION}."
        )


def main_hooks() -> list[Hook]:
    """Hooks for the main process."""
    return [
        Hook(
            f"{_PACKAGE}.scheduler_launcher._start_scheduler_processes",
            "around",
            _start_schedulers,
            "server_args port_args scheduler_procs",
            why="ends a launch in which a scheduler does not compress",
        ),
        Hook(
            f"{_PACKAGE}.servicer.SGLangSchedulerServicer._convert_generate_request",
            "after",
            _prefer_and_check,
            "self grpc_req",
            why="gives a request the operator's preferred settings, and refuses a bad field",
        ),
        Hook(
            f"{_PACKAGE}.request_manager.GrpcRequestManager._handle_batch_output",
            "before",
            _send_reports,
            "self batch_out",
            why="sends a finished request's report as trailing metadata",
        ),
        Hook(
            f"{_PACKAGE}.health_servicer.SGLangHealthServicer.engine_status",
            "around",
            _engine_status,
            "self service_name",
            why="takes a server whose compression has stopped out of rotation",
        ),
        Hook(
            f"{_PACKAGE}.servicer.await_probe",
            "around",
            _probe,
            "probe started last_receive timeout step",
            why="the same, for SMG's own health check",
        ),
    ]


def _start_schedulers(
    original: Callable, server_args: ServerArgs, port_args: PortArgs, scheduler_procs: list
) -> dict[str, Any]:
    from smg_grpc_servicer.sglang import scheduler_launcher

    if args_patch.config_of(server_args) is None:
        return original(server_args, port_args, scheduler_procs)
    try:
        with replaced(scheduler_launcher, "mp", CheckedPipes(scheduler_launcher.mp)):
            return original(server_args, port_args, scheduler_procs)
    except TriAttentionError as error:
        args_patch.refuse(server_args, error)


def _prefer_and_check(tokenized: TokenizedGenerateReqInput, servicer: Any, _: object) -> None:
    """Raises RequestError, a ValueError: the server answers it with INVALID_ARGUMENT."""
    rules = args_patch.rules_of(servicer.server_args)
    if rules is None:
        return
    params, media = tokenized.sampling_params, tokenized.mm_inputs
    preferred = servicer.server_args.preferred_sampling_params
    preferred = read_preferred(preferred) if isinstance(preferred, str) else preferred
    custom = with_preferred(preferred, params.custom_params)
    kinds = set() if media is None else kinds_of(media.mm_items)
    check_settings(rules, servicer.server_args, custom, params.beam_width, kinds)
    params.custom_params = custom


def _send_reports(manager: Any, batch_out: BatchTokenIDOutput) -> None:
    from sglang.srt.managers.io_struct import unwrap_from_pickle

    info = cast("Mapping[str, list]", unwrap_from_pickle(batch_out.customized_info) or {})
    for reason in info.get(reporting.STOPPED, ()):
        stopped.record_stop(reason)
    for rid, report in zip(batch_out.rids or (), info.get(reporting.KEY, ()), strict=False):
        # In most steps, no request has finished.
        state = None if report is None else manager.rid_to_state.get(rid)
        if state is not None and state.grpc_context is not None:
            state.grpc_context.set_trailing_metadata(((METADATA, json.dumps(report)),))


async def _engine_status(original: Callable, servicer: Any, service_name: str) -> int:
    from smg_grpc_servicer.health_frame import NOT_SERVING

    # The overall status is that of the process, as /health.
    if stopped.reason() is not None and service_name == servicer.SGLANG_SERVICE:
        return NOT_SERVING
    return await original(servicer, service_name)


async def _probe(original: Callable, *given: Any, **named: Any) -> bool | None:
    found = await original(*given, **named)
    return found if stopped.reason() is None else False
