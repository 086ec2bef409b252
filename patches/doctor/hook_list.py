"""Every hook of the package by the process that it runs in: for the documents and `doctor`."""

from __future__ import annotations

from sglang_triattn.config import Config
from sglang_triattn.patches import grpc_servicer, request_validation
from sglang_triattn.patches.calibration import engine as calibration
from sglang_triattn.patches.compression import Compression
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.launch import handshake, server_args
from sglang_triattn.patches.launch.census_switch import VARIABLE
from sglang_triattn.patches.observability import reporting
from sglang_triattn.patches.observability.census import Census
from sglang_triattn.patches.request import block_drafts
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.rounds.rules import complete

MAIN, CONTROLLER, SCHEDULER = "Main process", "Data-parallel controller", "Scheduler process"
GRPC = "Main process with `--smg-grpc-mode`"
BLOCKS = "Scheduler process with `--speculative-algorithm DFLASH`"
CENSUS, CALIBRATION = f"Scheduler process with `{VARIABLE}=1`", "`calibrate --engine sglang`"

# What no longer works when a target differs, because then no hook of that process is applied.
WITHOUT = {
    MAIN: "every launch with --enable-triattention is refused",
    GRPC: "every launch with --enable-triattention and --smg-grpc-mode is refused",
    CONTROLLER: "every launch with --enable-triattention and --dp-size above 1 is refused",
    SCHEDULER: "every launch with --enable-triattention is refused",
    BLOCKS: "every launch with --enable-triattention and --speculative-algorithm DFLASH is refused",
    CENSUS: f"every launch with {VARIABLE}=1 is refused",
    CALIBRATION: "`sglang-triattn calibrate --engine sglang` is refused",
}


def all_hooks() -> dict[str, list[Hook]]:
    """The hooks by the process that they run in."""
    main = (server_args.hooks(*[lambda _: None] * 3), handshake.main_hooks(), reporting.main_hooks())
    census = Census(Conversations(1)).hooks()
    # The scheduler's hooks include the census's where the environment asks for it.
    of_census = {hook.target for hook in census}
    return {
        MAIN: [hook for group in (*main, request_validation.main_hooks()) for hook in group],
        GRPC: grpc_servicer.main_hooks(),
        CONTROLLER: handshake.controller_hooks(),
        SCHEDULER: [hook for hook in Compression(complete(Config())).hooks() if hook.target not in of_census],
        BLOCKS: block_drafts.hooks(),
        CENSUS: census,
        CALIBRATION: [
            *calibration.main_hooks(),
            *calibration.scheduler_hooks(server_args.CalibrationRequest("", "")),
        ],
    }
