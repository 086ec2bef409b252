"""A second SGLang plugin, only for tests: records every batch that decodes, as the real scheduler runs it.

Loaded through its own entry point (see `harness.install_plugin`), it sees the rows, lengths and K/V that the next
forward pass will use, and appends one JSON line per step to the file named by PROBE_FILE. Of a mixed batch, only
lengths. What is in the pool, a quarter of a step to read, only with PROBE_CONTENTS.
"""

from __future__ import annotations

import json
import os
import zlib

import torch


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", record, HookType.BEFORE)


def record(scheduler, batch, *_, **__) -> None:
    """Writes one line: each request's lengths, its slots and their content, and a checksum of its frozen K/V bytes."""
    if batch.forward_mode.is_mixed():
        lengths = {request.rid: request.kv.kv_allocated_len for request in batch.decoding_reqs}
        append({"requests": [], "mixed": lengths})
    if not batch.forward_mode.is_decode():
        return
    if torch.cuda.is_available():
        # The step that is queued, and the moves of its rounds.
        torch.cuda.synchronize()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rows = scheduler.req_to_token_pool.req_to_token
    seen = []
    for index, request in enumerate(batch.reqs):
        protected = request.kv.cache_protected_len
        seen.append(
            {
                "rid": request.rid,
                "prompt": len(request.origin_input_ids),
                "protected": protected,
                "physical": request.kv.kv_allocated_len,
                "attended": int(batch.seq_lens_cpu[index]),
                "logical": int(batch.orig_seq_lens[index]),
                "retractions": request.retraction_count,
                # With overlap, the token that the queued step samples is not among them yet.
                "known": len(request.origin_input_ids) + len(request.output_ids),
            }
        )
        if "PROBE_CONTENTS" in os.environ:
            row = rows[request.kv.req_pool_idx, : int(batch.seq_lens_cpu[index])].long()
            seen[-1] |= {"checksum": checksum(pool, row[:protected]), **contents(pool, row)}
    free = scheduler.token_to_kv_pool_allocator.available_size()
    append({"free": free, "requests": seen})


def buffers_of(pool) -> list:
    """Keys and values of all layers that have some, or the latents that are both."""
    pool = getattr(pool, "full_kv_pool", pool)
    return getattr(pool, "kv_buffer", None) or [*pool.k_buffer, *pool.v_buffer]


def append(line: dict) -> None:
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps(line) + "\n")


def checksum(pool, slots) -> int:
    """One of all K/V bytes at these slots."""
    found = 0
    for buffer in buffers_of(pool):
        found = zlib.crc32(buffer[slots].contiguous().cpu().numpy().tobytes(), found)
    return found


def contents(pool, slots) -> dict:
    """A row's slots, the last of which this step writes; a number for each slot's K/V bytes; the newest key.

    The key is the first layer's, [H_kv * head_dim], which depends only on its token and position.
    """
    prints = torch.zeros((), dtype=torch.int64, device=slots.device)
    for buffer in buffers_of(pool):
        words = buffer[slots].contiguous().flatten(1).view(torch.int32).long()
        prints = prints * 31 + (words * torch.arange(1, 2 * words.shape[1], 2, device=words.device)).sum(1)
    newest = buffers_of(pool)[0][slots[-2]].float().flatten()
    return {"slots": slots.tolist(), "prints": prints.tolist(), "newest_key": newest.tolist()}
