"""SGLang's classes, with types for attributes that SGLang declares as object or None and fills in at run time.

For the type checker only: nothing imports this module at run time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from sglang.srt import server_args
    from sglang.srt.beam_search import beam_group
    from sglang.srt.managers import scheduler
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
    from sglang.srt.model_executor import model_runner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    RowAllocator = PagedTokenToKVPoolAllocator | TokenToKVPoolAllocator
    KVAllocator = RowAllocator | SWATokenToKVPoolAllocator

    class Scheduler(scheduler.Scheduler):
        """A fully built scheduler, on a device for which compression is allowed."""

        chunked_req: Req | None
        req_to_token_pool: ReqToTokenPool
        schedule_stream: torch.Stream
        spec_algorithm: SpeculativeAlgorithm
        token_to_kv_pool_allocator: KVAllocator
        tree_cache: UnifiedRadixCache

    class BeamGroup(beam_group.BeamGroup):
        """A beam search whose prompt has been prefilled."""

        leader: Req
        prompt_len: int

    class ModelRunner(model_runner.ModelRunner):
        """A runner whose pools have been built."""

        req_to_token_pool: ReqToTokenPool

    class ServerArgs(server_args.ServerArgs):
        """What the user gave. SGLang puts the fields together at run time."""

        attention_backend: str | None
        decode_attention_backend: str | None
        disaggregation_mode: str
        enable_response_store: bool
        moe_runner_backend: str
        pp_size: int
        prefill_attention_backend: str | None
        speculative_algorithm: str | None
        speculative_num_draft_tokens: int | None
