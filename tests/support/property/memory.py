"""SGLang's real tree, allocator, row table and KV pool, in small, with this package's compressor on top."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import torch
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_schedule, get_serving, get_spec

from content import HEAD_DIM, KV_HEADS, LAYERS, Q_HEADS
from sglang_triattn.config import Config
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.score.tables import build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.patches.model.buffers import make_mover
from sglang_triattn.patches.request import window_pool
from sglang_triattn.patches.rounds.compressor import Compressor
from sglang_triattn.patches.rounds.launches import Launch
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.release import Rows
from sglang_triattn.patches.scheduler.row_copy import RowCopier
from sglang_triattn.rounds.rules import complete

POOL, ROWS, CONTEXT = 192, 6, 160
BUDGET, INTERVAL, RECENT, SINKS = 13, 7, 3, 2


class RehearsedCompressor(Compressor):
    """Runs no round of a kind that no launch rehearses, for which kernels would compile while requests wait."""

    def score_and_move(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        assert launch.shape.strategy in self.strategies, launch.shape
        return super().score_and_move(launch)


class Memory:
    """A server's memory.

    Args:
        pool: number of slots.
        strip_thinking: SGLang's --strip-thinking-cache.
        force_miss: SGLang's SGLANG_RADIX_FORCE_MISS: every prompt is computed again, and the tree receives a copy of
            what it already has, as it does for prompts that are admitted together.
        eviction: SGLang's --radix-eviction-policy.
        window: tokens that a query of a window layer sees, one layer more, with a KV pool of its own; 0 for
            none.
        reserve: slots after a row's computed entries while it decodes, as for drafted tokens; an even number.
        queued: how many slots of the reserve a queued step writes while rounds run, at most.
        decodes_alone: whether this is a decode server, whose prompts another one prefills.
        settings: fields of the server's Config.
    """

    def __init__(
        self,
        page_size: int,
        radix: bool = True,
        kernels: bool = False,
        pool: int = POOL,
        strip_thinking: bool = False,
        force_miss: bool = False,
        eviction: str = "lru",
        window: int = 0,
        reserve: int = 0,
        queued: int = 0,
        decodes_alone: bool = False,
        **settings,
    ) -> None:
        self.page_size, self.pool_size = page_size, pool
        self.strip_thinking, self.force_miss = strip_thinking, force_miss
        asked = Config(**{"budget": BUDGET, "interval": INTERVAL, "recent": RECENT, "sinks": SINKS, **settings})
        self.config = complete(asked, window=window, page_size=page_size, whole_pages=bool(queued))
        self.radix, self.reserve, self.queued = radix, reserve, queued
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(
            pool, page_size, torch.float32, KV_HEADS, HEAD_DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        plain = {"dtype": torch.float32, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        self.window = window
        if window:
            self.allocator, self.window_keys = self._two_pools(pool)
        elif page_size == 1:
            self.allocator = TokenToKVPoolAllocator(pool, **plain)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(pool, page_size, **plain)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not radix,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL, ComponentType.SWA) if window else (ComponentType.FULL,),
                sliding_window_size=window - 1 if window else None,
                eviction_policy=eviction,
            )
        )
        scheduler = SimpleNamespace(
            enable_overlap=False,
            spec_algorithm=SimpleNamespace(is_none=lambda: not reserve),
            server_args=SimpleNamespace(speculative_num_draft_tokens=reserve),
            tp_group=SimpleNamespace(world_size=1),
            dp_tp_group=SimpleNamespace(world_size=1),
            pp_group=SimpleNamespace(world_size=1),
            disaggregation_mode=DisaggregationMode.DECODE if decodes_alone else DisaggregationMode.NULL,
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            stash_chunked_request=self.stash,
            max_total_num_tokens=1 << 20,
        )
        self.conversations = Conversations(ttl=600)
        # A process without drafts need not have SGLang's settings.
        with self.flags() if reserve else nullcontext():
            self.conversations.attach(scheduler)
            self.compressor = self._compressor(scheduler, kernels)
        self.ends = Rows(self.conversations)
        self.conversations.copier = self._copier(scheduler, kernels)

    def _compressor(self, scheduler: SimpleNamespace, kernels: bool | None) -> Compressor:
        generator = torch.Generator().manual_seed(0)
        mean = torch.randn(LAYERS, Q_HEADS, HEAD_DIM // 2, dtype=torch.complex64, generator=generator)
        inv_freq = 100.0 ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) / 4)
        return RehearsedCompressor(
            scheduler,
            self.config,
            Scorer(
                self.pool.k_buffer,
                build_tables(mean, mean.abs() + 0.1, inv_freq, 1.0, "half", KV_HEADS, "cpu"),
                num_tokens=CONTEXT,
                longest=CONTEXT,
                selection=self.config.selection,
                v_buffers=self.pool.v_buffer,
                value_share=self.config.value_share,
                recency=self.config.recency,
                kernels=kernels,
            ),
            make_mover(self.config, self.page_size, self.pool, range(self.pool.layer_num), kernels=kernels),
            self.conversations,
        )

    def _copier(self, scheduler: SimpleNamespace, kernels: bool | None) -> RowCopier:
        pools = [self.pool, *([self.window_pool] if self.window else [])]
        slots, *peers = (Mover(pool.k_buffer, pool.v_buffer, kernels=kernels) for pool in pools)
        return RowCopier(scheduler, [slots], peers)

    def _two_pools(self, size: int) -> tuple[SWATokenToKVPoolAllocator, torch.Tensor]:
        """An allocator of slots in two pools, and the keys of the smaller one."""
        smaller = size * 3 // 4 // self.page_size * self.page_size
        both = SWAKVPool(
            size,
            smaller,
            self.page_size,
            torch.float32,
            KV_HEADS,
            HEAD_DIM,
            swa_attention_layer_ids=[LAYERS],
            full_attention_layer_ids=list(range(LAYERS)),
            device="cpu",
        )
        self.pool = both.full_kv_pool
        allocator = SWATokenToKVPoolAllocator(size, smaller, self.page_size, torch.float32, "cpu", both, False)
        self.window_pool = both.swa_kv_pool
        return allocator, both.swa_kv_pool.get_key_buffer(0)

    @property
    def slots(self) -> TokenToKVPoolAllocator | PagedTokenToKVPoolAllocator:
        """The allocator of the slots that rows list."""
        return window_pool.row_allocator(self.allocator)

    def slide(self, req: Req) -> None:
        """SGLang's freeing of what a window has left, before a decode step."""
        if not self.window:
            return
        batch = SimpleNamespace(forward_mode=ForwardMode.DECODE, tree_cache=self.tree)
        reach, interval = self.window - 1, 5
        due = ScheduleBatch._swa_eviction_trigger(batch, reach, interval)
        if window_pool._due_by_row(due, batch, reach, interval)(req):
            window_pool._slide_by_row(ScheduleBatch._evict_swa, batch, req, req.seqlen - 1)

    def stash(self, req: Req) -> None:
        self.ends.checkpoint(checkpoint_kv_cache, req, self.tree)

    @contextmanager
    def flags(self):
        """SGLang's settings that decide what a row gives to the tree, and how large its reserve is."""
        drafts = {"speculative_algorithm": None}
        if self.reserve:
            # SGLang's reserve is twice what a step drafts.
            drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": self.reserve // 2}
        with (
            get_serving().override(strip_thinking_cache=self.strip_thinking),
            get_schedule().override(page_size=self.page_size),
            get_spec().override(**drafts),
        ):
            yield

    def content(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, LAYERS, 2, KV_HEADS, HEAD_DIM]: K and V at `slots`, as the pool holds them."""
        buffers = [
            buffer[slots.long()] for pair in zip(self.pool.k_buffer, self.pool.v_buffer, strict=True) for buffer in pair
        ]
        return torch.stack(buffers, 1).unflatten(1, (LAYERS, 2))

    def allocate(self, row: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if self.page_size == 1:
            return self.allocator.alloc(end - start)
        if start % self.page_size and end == start + 1 and not self.window:
            # Its page has room: SGLang's allocator gives the next slot of it, after twenty operations.
            return row[start - 1 : start] + 1
        before, after = torch.tensor([start]), torch.tensor([end])
        last = row[start - 1 : start].long() if start else torch.tensor([-1])
        return self.allocator.alloc_extend(before, before, after, after, last, end - start)

    def make_room(self, tokens: int) -> bool:
        if self.allocator.available_size() < tokens and self.radix:
            evict_from_tree_cache(self.tree, tokens)
        while self.allocator.available_size() < tokens and self.conversations.drop_one():
            if self.radix:
                evict_from_tree_cache(self.tree, tokens)
        return self.allocator.available_size() >= tokens

    def make_row(self) -> bool:
        while not self.rows.available_size() and self.conversations.drop_one():
            pass
        return bool(self.rows.available_size())
