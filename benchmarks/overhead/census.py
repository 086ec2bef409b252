"""What does one census of the whole server (SGLANG_TRIATTN_CHECK=1) cost?

Uses SGLang's own tree, allocator, row table and requests, without a model: `requests` rows of `row_length` entries, of
which `FROZEN` are a prompt that all of them share through the tree. The rest of the pool is free. `milliseconds` is the
median of one census; while requests run, it is taken before and after the rounds of each step that has any. No figure
is reported unless the census notices a slot that is freed while its request holds it.

    python -m benchmarks.overhead.census --json census.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from array import array
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import report

FROZEN = 128
# (requests, entries of a row, slots of the pool)
CASES = [(1, 256, 65_536), (8, 2176, 65_536), (24, 2176, 65_536), (64, 2176, 1_048_576), (256, 2176, 1_048_576)]
QUICK_CASES = [(1, 256, 4096), (8, 256, 4096)]


def publish_settings() -> None:
    """Publishes the process-wide settings that SGLang's requests and trees read."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import ServerArgs

    settings = ServerArgs(model_path="dummy")
    settings.resolve_once()
    publish(settings, role="scheduler")


def scheduler_with(requests: int, row_length: int, pool: int, page_size: int, device: str) -> SimpleNamespace:
    """What the census reads of a scheduler between two steps."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    rows = ReqToTokenPool(requests, row_length, device, enable_memory_saver=False)
    # The allocator only hands out numbers; no K/V exists.
    plain = {"dtype": torch.bfloat16, "device": device, "kvcache": None, "need_sort": False}
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(pool, **plain)
    else:
        allocator = PagedTokenToKVPoolAllocator(pool, page_size, **plain)
    tree = UnifiedRadixCache(
        CacheInitParams(
            disable=False,
            req_to_token_pool=rows,
            token_to_kv_pool_allocator=allocator,
            page_size=page_size,
            tree_components=(ComponentType.FULL,),
        )
    )
    running = [running_request(number, row_length, rows, allocator, tree) for number in range(requests)]
    held = torch.full((requests,), row_length, device=device)
    batch = SimpleNamespace(
        reqs=running,
        req_pool_indices=torch.tensor([request.kv.req_pool_idx for request in running], device=device),
        seq_lens=held,
        seq_lens_cpu=held.cpu(),
        orig_seq_lens=held.int(),
        spec_info=None,
    )
    return SimpleNamespace(
        enable_overlap=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        pp_group=SimpleNamespace(world_size=1),
        disaggregation_mode=DisaggregationMode.NULL,
        forward_ct=0,
        token_to_kv_pool_allocator=allocator,
        req_to_token_pool=rows,
        tree_cache=tree,
        running_batch=batch,
        last_batch=None,
        chunked_req=None,
        waiting_queue=[],
        result_queue=[],
    )


def running_request(number: int, row_length: int, rows: Any, allocator: Any, tree: Any) -> Any:
    """A request whose prompt is in the tree and that has generated the rest of its row."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.common import checkpoint_kv_cache
    from sglang.srt.sampling.sampling_params import SamplingParams

    request = Req(f"r{number}", "", array("q", range(FROZEN)), SamplingParams(max_new_tokens=row_length))
    request.init_next_round_input(tree)
    request.lock = tree.lock(request.last_node)
    rows.alloc([request])
    row = rows.req_to_token[request.kv.req_pool_idx]
    known = request.prefix_len
    if known:
        row[:known] = tree.path_device_indices(request.last_node)[:known].to(row.dtype)
    row[known:] = allocator.alloc(row_length - known).to(row.dtype)
    request.kv.kv_committed_len = request.kv.kv_allocated_len = request.extend_end = FROZEN
    checkpoint_kv_cache(request, tree)
    request.output_ids.extend(range(row_length - FROZEN + 1))
    request.kv.kv_committed_len = request.kv.kv_allocated_len = row_length
    return request


def milliseconds(scheduler: SimpleNamespace, repeats: int) -> float:
    """Median time of a census of this scheduler.

    Raises:
        SystemExit: the census does not notice a slot that is both free and held.
    """
    from sglang_triattn.census import IntegrityError
    from sglang_triattn.patches.observability.census import Census
    from sglang_triattn.patches.scheduler.conversations import Conversations

    census = Census(Conversations(ttl=600))
    census.attach(scheduler)
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        census.on_idle(scheduler)
        times.append(1e3 * (time.perf_counter() - start))
    last = scheduler.running_batch.reqs[-1].kv
    scheduler.token_to_kv_pool_allocator.free(
        scheduler.req_to_token_pool.req_to_token[last.req_pool_idx, last.kv_allocated_len - 1].reshape(1).long()
    )
    try:
        census.on_idle(scheduler)
    except IntegrityError:
        return statistics.median(times[1:])
    raise SystemExit("the census does not notice a slot that is free and held")


def measure(cases: Sequence[tuple[int, int, int]], device: str, repeats: int) -> Iterator[dict]:
    for requests, row_length, pool in cases:
        for page_size in (1, 16):
            scheduler = scheduler_with(requests, row_length, pool, page_size, device)
            yield {
                "shape": f"{requests}x{row_length} of {pool}",
                "requests": requests,
                "row_length": row_length,
                "pool_slots": pool,
                "page_size": page_size,
                "milliseconds": milliseconds(scheduler, repeats),
            }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time of one census of the whole server.")
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=15, help="timed runs (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="small pools and 3 runs; less than a minute")
    arguments = parser.parse_args(argv)
    publish_settings()
    cases, repeats = (QUICK_CASES, 3) if arguments.quick else (CASES, arguments.repeats)
    report(list(measure(cases, arguments.device, repeats)), arguments.json, arguments.quick)


if __name__ == "__main__":
    main()
