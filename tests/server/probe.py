"""A second SGLang plugin, for tests alone: writes down every decode batch as the real scheduler runs it.

Loaded through an entry point of its own (see `harness.install_plugin`), it sees the rows, lengths and K/V that the next
forward pass will use, and appends one JSON line for each decode step to the file named by PROBE_FILE.
"""

from __future__ import annotations

import json
import os
import zlib


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", record, HookType.BEFORE)


def record(scheduler, batch, *_, **__) -> None:
    """One line: for each request its lengths, its evicted count, and a checksum of its frozen K/V bytes."""
    if not batch.forward_mode.is_decode():
        return
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rows = scheduler.req_to_token_pool.req_to_token
    seen = []
    for index, request in enumerate(batch.reqs):
        protected = request.kv.cache_protected_len
        slots = rows[request.kv.req_pool_idx, :protected].long()
        checksum = 0
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            checksum = zlib.crc32(buffer[slots].contiguous().numpy().tobytes(), checksum)
        seen.append(
            {
                "rid": request.rid,
                "prompt": len(request.origin_input_ids),
                "protected": protected,
                "physical": request.kv.kv_allocated_len,
                "attended": int(batch.seq_lens_cpu[index]),
                "logical": int(batch.orig_seq_lens[index]),
                "checksum": checksum,
            }
        )
    free = scheduler.token_to_kv_pool_allocator.available_size()
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps({"free": free, "requests": seen}) + "\n")
