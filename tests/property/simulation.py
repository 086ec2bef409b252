"""A scheduler in miniature over SGLang's real tree, allocator, row table, KV pool and requests.

Every K/V row that a request computes is a content oracle: it says which layer and head it is of, which token it is, at
which logical position, and whether it was computed before its request's first eviction (exact) or by which request
after it (tainted). Whatever moves, whoever reads a row back finds out whose content it holds.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace

import torch
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.common import checkpoint_kv_cache, evict_from_tree_cache, release_kv_cache
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_triattn.config import Config
from sglang_triattn.kernels.score import build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.patches import prefill as prefill_patch
from sglang_triattn.patches import requests as requests_patch
from sglang_triattn.patches.compressor import Compressor, make_mover
from sglang_triattn.patches.conversations import Conversations
from sglang_triattn.patches.rows import Rows
from sglang_triattn.request_settings import Asked

LAYERS, KV_HEADS, Q_HEADS, HEAD_DIM = 2, 2, 4, 8
POOL, ROWS, CONTEXT = 192, 6, 160
BUDGET, INTERVAL, RECENT, SINKS = 13, 7, 3, 2


@dataclass(eq=False)
class Running:
    """A request and the independent account of it: the logical position of every KV entry of its row.

    positions: [LAYERS, KV_HEADS, physical length]; heads differ only where each has its own kept set.
    prompt_length: of its first turn, where it goes on behind another's row.
    """

    req: Req
    positions: torch.Tensor = field(default_factory=lambda: same_for_all([]))
    first_tainted: int | None = None
    prompt_length: int = 0

    @property
    def tokens(self) -> list[int]:
        return list(self.req.origin_input_ids + self.req.output_ids)

    @property
    def evicted(self) -> int:
        return requests_patch.state_of(self.req).evicted_tokens


class Simulation:
    """Admission, decode, rounds, retraction and release as SGLang's scheduler does them, one step at a time."""

    def __init__(self, page_size: int, radix: bool = True, kernels: bool = False, pool: int = POOL, **settings) -> None:
        self.page_size, self.pool_size = page_size, pool
        self.config = Config(**{"budget": BUDGET, "interval": INTERVAL, "recent": RECENT, "sinks": SINKS, **settings})
        self.radix = radix
        self.rows = ReqToTokenPool(ROWS, CONTEXT, "cpu", enable_memory_saver=False)
        self.pool = MHATokenToKVPool(
            pool, page_size, torch.float32, KV_HEADS, HEAD_DIM, LAYERS, "cpu", enable_memory_saver=False
        )
        plain = {"dtype": torch.float32, "device": "cpu", "kvcache": self.pool, "need_sort": False}
        if page_size == 1:
            self.allocator = TokenToKVPoolAllocator(pool, **plain)
        else:
            self.allocator = PagedTokenToKVPoolAllocator(pool, page_size, **plain)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=not radix,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=page_size,
                tree_components=(ComponentType.FULL,),
            )
        )
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.finished: list[list[int]] = []
        self.talks: dict[str, tuple] = {}
        self.spoken: dict[str, list[int]] = {}
        self.resumed = self.shared_starts = 0
        self.rounds = self.early_rounds = self.prefill_rounds = 0
        self._serial = 0
        generator = torch.Generator().manual_seed(0)
        mean = torch.randn(LAYERS, Q_HEADS, HEAD_DIM // 2, dtype=torch.complex64, generator=generator)
        inv_freq = 100.0 ** (-torch.arange(HEAD_DIM // 2, dtype=torch.float64) / 4)
        scheduler = SimpleNamespace(
            enable_overlap=False,
            tp_group=SimpleNamespace(world_size=1),
            token_to_kv_pool_allocator=self.allocator,
            req_to_token_pool=self.rows,
            tree_cache=self.tree,
            stash_chunked_request=self._stash,
        )
        self.conversations = Conversations(ttl=600)
        self.conversations.attach(scheduler)
        self.ends = Rows(self.conversations)
        self.compressor = Compressor(
            scheduler,
            self.config,
            Scorer(
                self.pool.k_buffer,
                build_tables(mean, mean.abs() + 0.1, inv_freq, 1.0, "half", KV_HEADS, "cpu"),
                columns=CONTEXT,
                longest=CONTEXT,
                selection=self.config.selection,
                kernels=kernels,
            ),
            make_mover(self.config, page_size, self.pool, kernels=kernels),
            self.conversations,
        )

    def request(self, prompt: list[int], conversation: str | None = None) -> Running:
        self._serial += 1
        req = Req(f"r{self._serial}", "", array("q", prompt), SamplingParams(max_new_tokens=CONTEXT))
        req.serial = self._serial
        requests_patch.adopt(req, Asked(self.config, conversation))
        return Running(req)

    def admit(self, running: Running, chunk: int, between_chunks=None) -> bool:
        """Prefill in chunks of `chunk` tokens; False, and nothing changed, where the pool has no room.

        between_chunks(running): runs the rounds between two chunks, and brings the account up to date.
        """
        req = running.req
        self._next_input(req, self.tree)
        lent = self.conversations.lend(req)
        req.lock = self.tree.lock(req.last_node)
        needed = len(req.full_untruncated_fill_ids) - req.prefix_len + self.page_size
        if not self._make_room(needed) or not (lent or self._make_row()):
            self.tree.unlock(req.lock)
            req.lock = None
            if lent:
                self.conversations.take_back(req)
            return False
        self.rows.alloc([req])
        row = self.rows.req_to_token[req.kv.req_pool_idx]
        req.is_retracted = False
        if lent:
            talk = self.talks[requests_patch.asked_of(req).conversation]
            running.positions, running.first_tainted, running.prompt_length, req.serial = talk
            self.resumed += 1
        else:
            if req.prefix_len:
                row[: req.prefix_len] = self.tree.path_device_indices(req.last_node)[: req.prefix_len].to(row.dtype)
            running.positions = same_for_all(range(req.prefix_len))
            running.first_tainted, running.prompt_length = None, len(req.origin_input_ids)
        self.conversations.settle(req)
        while not self._prefill(running, row, chunk):
            if between_chunks is not None:
                between_chunks(running)
            if req.extend_end > req.prefix_len:
                self._stash(req)
            self._next_input(req)
        self._stash(req)
        req.output_ids.append(self._next_token(running))
        self.running.append(running)
        return True

    def _prefill(self, running: Running, row: torch.Tensor, chunk: int) -> bool:
        """One chunk; True after the last."""
        req = running.req
        start, end = req.prefix_len, min(len(req.full_untruncated_fill_ids), req.prefix_len + chunk)
        req.extend_end = end
        positions = range(start + running.evicted, end + running.evicted)
        assert list(req.get_fill_ids()[start:]) == running.tokens[positions.start : positions.stop]
        row[start:end] = self._allocate(row, start, end).to(row.dtype)
        self._write(running, row[start:end], positions)
        running.positions = torch.cat([running.positions, same_for_all(positions)], -1)
        req.kv.kv_allocated_len = req.kv.kv_committed_len = end
        return end == len(req.full_untruncated_fill_ids)

    def _stash(self, req: Req) -> None:
        self.ends.checkpoint(checkpoint_kv_cache, req, self.tree)

    def _next_input(self, req: Req, *tree) -> None:
        prefill_patch._show_ids_behind_row(Req.init_next_round_input, req, *tree)

    def decode(self, running: Running) -> bool:
        req, kv = running.req, running.req.kv
        length = kv.kv_allocated_len
        position = length + running.evicted
        if position + 1 >= CONTEXT or not self._make_room(self.page_size):
            return False
        row = self.rows.req_to_token[kv.req_pool_idx]
        row[length : length + 1] = self._allocate(row, length, length + 1).to(row.dtype)
        self._write(running, row[length : length + 1], [position])
        running.positions = torch.cat([running.positions, same_for_all([position])], -1)
        kv.kv_allocated_len = kv.kv_committed_len = length + 1
        req.output_ids.append(self._next_token(running))
        return True

    def compress(self, chunked: Running | None = None) -> SimpleNamespace:
        """Due rounds of the running batch and of a prefill between two chunks; returns the batch as they left it."""
        lengths = torch.tensor([r.req.kv.kv_allocated_len for r in self.running])
        logical = torch.tensor([r.req.kv.kv_allocated_len + r.evicted for r in self.running], dtype=torch.int32)
        batch = SimpleNamespace(
            reqs=[r.req for r in self.running],
            seq_lens=lengths.clone(),
            seq_lens_cpu=lengths,
            orig_seq_lens=logical,
            seq_lens_sum=int(lengths.sum()),
            batch_is_full=True,
        )
        self.compressor.run_due_rounds(batch, chunked=None if chunked is None else chunked.req)
        self.rounds = self.compressor.totals.rounds
        return batch

    def release(self, running: Running, *, finish: bool) -> None:
        self.running.remove(running)
        if finish:
            running.req.finished_reason = FINISH_LENGTH(length=len(running.req.output_ids))
            self.finished.append(running.tokens[:-1])
        exact = exact_length(running.positions) // self.page_size * self.page_size
        protected = running.req.kv.cache_protected_len
        self.ends.release(release_kv_cache, running.req, self.tree, checkpoint=finish)
        if finish and self.radix and not requests_patch.asked_of(running.req).kept:
            found = Req("probe", "", array("q", running.tokens), SamplingParams(max_new_tokens=1))
            found.init_next_round_input(self.tree)
            assert found.prefix_len >= exact, "exact K/V was thrown away"
            self.shared_starts += running.first_tainted is not None and exact > protected
        asked = requests_patch.asked_of(running.req)
        if finish and asked.conversation is not None:
            talk = running.positions, running.first_tainted, running.prompt_length, running.req.serial
            self.talks[asked.conversation] = talk
            self.spoken[asked.conversation] = running.tokens

    def retract(self, running: Running) -> None:
        self.release(running, finish=False)
        running.req.reset_for_retract()
        self.waiting.append(running)

    def content(self, slots: torch.Tensor) -> torch.Tensor:
        """[n, LAYERS, 2, KV_HEADS, HEAD_DIM]: K and V of `slots`, as they are in the pool."""
        buffers = [
            buffer[slots.long()] for pair in zip(self.pool.k_buffer, self.pool.v_buffer, strict=True) for buffer in pair
        ]
        return torch.stack(buffers, 1).unflatten(1, (LAYERS, 2))

    def row(self, running: Running) -> torch.Tensor:
        kv = running.req.kv
        return self.rows.req_to_token[kv.req_pool_idx, : kv.kv_allocated_len]

    def _write(self, running: Running, slots: torch.Tensor, positions) -> None:
        content = contents(running.tokens, same_for_all(positions), running.req.serial if running.evicted else 0)
        for layer, (k, v) in enumerate(zip(self.pool.k_buffer, self.pool.v_buffer, strict=True)):
            k[slots.long()] = content[:, layer, 0]
            v[slots.long()] = content[:, layer, 1]

    def _allocate(self, row: torch.Tensor, start: int, end: int) -> torch.Tensor:
        if self.page_size == 1:
            return self.allocator.alloc(end - start)
        before, after = torch.tensor([start]), torch.tensor([end])
        last = row[start - 1 : start].long() if start else torch.tensor([-1])
        return self.allocator.alloc_extend(before, before, after, after, last, end - start)

    def _make_room(self, tokens: int) -> bool:
        if self.allocator.available_size() < tokens and self.radix:
            evict_from_tree_cache(self.tree, tokens)
        while self.allocator.available_size() < tokens and self.conversations.drop_one():
            if self.radix:
                evict_from_tree_cache(self.tree, tokens)
        return self.allocator.available_size() >= tokens

    def _make_row(self) -> bool:
        while not self.rows.available_size() and self.conversations.drop_one():
            pass
        return bool(self.rows.available_size())

    def _next_token(self, running: Running) -> int:
        # A function of what came before, so that retracted and repeated requests go on alike.
        return 1 + (sum(running.tokens) * 31 + len(running.tokens)) % 5


def exact_length(positions: torch.Tensor) -> int:
    """Entries of a row before the first hole in any layer or head."""
    there = (positions == torch.arange(positions.shape[-1])).all(0).all(0)
    return int(there.long().cumprod(0).sum())


def same_for_all(positions) -> torch.Tensor:
    """[LAYERS, KV_HEADS, n] int64 of n positions that all heads share."""
    return torch.tensor(list(positions), dtype=torch.int64).expand(LAYERS, KV_HEADS, -1)


def contents(tokens: list[int], positions: torch.Tensor, stamps: torch.Tensor | int) -> torch.Tensor:
    """[n, LAYERS, 2, KV_HEADS, HEAD_DIM]: K and V that name their token, position, stamp, layer, K or V, and head.

    positions: [LAYERS, KV_HEADS, n]; stamps: one for all, or as positions.
    """
    token = torch.tensor(tokens)[positions]
    seed = torch.arange(LAYERS * 2 * KV_HEADS, dtype=torch.float32).reshape(LAYERS, 2, KV_HEADS, 1, 1)
    place = (torch.arange(HEAD_DIM) * (positions[..., None] + 1) * 0.37 + token[..., None])[:, None]
    content = torch.sin(seed * 7 + place)  # [LAYERS, 2, KV_HEADS, n, HEAD_DIM]
    for column, named in enumerate((token, positions, torch.as_tensor(stamps).expand_as(positions))):
        content[..., column] = named[:, None]
    return content.permute(3, 0, 1, 2, 4)
