"""A second SGLang plugin, only for tests: records what each rank of a decode server retracts.

Loaded like `step_probe`. Appends one JSON line per retraction to the file named by PROBE_FILE: the rank's process, the
request's id, its tokens so far, and whether its row has become shorter since the last batch that it was part of, as it
does if it has a round in the step of its retraction.
"""

from __future__ import annotations

import json
import os

computed: dict[str, int] = {}
"""Entries of each row in the last batch that the request was part of."""


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", note, HookType.BEFORE)
    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.release_req", record, HookType.BEFORE)


def note(_, batch, *__, **___) -> None:
    computed.update((request.rid, request.kv.kv_committed_len) for request in batch.reqs)


def record(batch, index, *_, **__) -> None:
    request = batch.reqs[index]
    line = {
        "rank": os.getpid(),
        "rid": request.rid,
        "tokens": request.seqlen,
        # The next row may be retracted before it is part of a batch.
        "shortened": request.kv.kv_committed_len < computed.pop(request.rid, 0),
    }
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps(line) + "\n")
