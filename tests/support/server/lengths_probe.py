"""A second SGLang plugin, only for tests: records how many entries each row of a batch holds in each decode step.

Appends one JSON line per batch to the file named by PROBE_FILE: request id -> entries.
"""

from __future__ import annotations

import json
import os


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", record, HookType.AFTER)


def record(_, scheduler, batch, *__, **___) -> None:
    held = {request.rid: request.kv.kv_allocated_len for request in batch.reqs}
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps(held) + "\n")
