"""A second SGLang plugin, only for tests: records what every head of every layer holds after each forward pass.

Loaded like `step_probe`. Appends one JSON line per batch to the file named by PROBE_FILE: request id -> numbers
[L][H_kv][entries of the row], each computed from the bytes of one entry's K and V. Tokens at different positions have
different numbers.
"""

from __future__ import annotations

import json
import os

import torch


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.run_batch", record, HookType.AFTER)


def record(_, scheduler, batch, *__, **___) -> None:
    if torch.cuda.is_available():
        # The step that is queued writes entries.
        torch.cuda.synchronize()
    pool = scheduler.token_to_kv_pool_allocator.get_kvcache()
    rows = scheduler.req_to_token_pool.req_to_token
    held = {}
    for request in batch.reqs:
        slots = rows[request.kv.req_pool_idx, : request.kv.kv_allocated_len].long()
        held[request.rid] = [
            (number_of(k[slots]) * 31 + number_of(v[slots])).T.tolist()
            for k, v in zip(pool.k_buffer, pool.v_buffer, strict=True)
        ]
    with open(os.environ["PROBE_FILE"], "a") as file:
        file.write(json.dumps(held) + "\n")


def number_of(entries: torch.Tensor) -> torch.Tensor:
    """[n, H_kv] int64 from all bytes of entries [n, H_kv, head_dim]."""
    words = entries.contiguous().view(torch.int32).long()
    return (words * torch.arange(1, 2 * words.shape[-1], 2, device=words.device)).sum(-1)
