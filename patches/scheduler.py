"""Compression inside the scheduler process. SGLang part: `Scheduler` (sglang/srt/managers/scheduler.py)."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import torch

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.score import build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.patches import handshake, positions, prefill, reporting
from sglang_triattn.patches.admission import Admission
from sglang_triattn.patches.compressor import Compressor, kv_buffers, make_mover
from sglang_triattn.patches.conversations import Conversations
from sglang_triattn.patches.hooks import Hook, check_in_place
from sglang_triattn.patches.metrics import RoundMetrics
from sglang_triattn.patches.ranks import merge_over_ranks, own_heads
from sglang_triattn.patches.rows import Rows
from sglang_triattn.patches.scratch import Scratch
from sglang_triattn.patches.served_model import check_pool, read_shape
from sglang_triattn.patches.statistics import find_stats
from sglang_triattn.rounds import Totals, scored_tokens

logger = logging.getLogger(__name__)


class Compression:
    """Compression in this process: why it refused, or the compressor that runs."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.compressor: Compressor | None = None
        self.refusal: str | None = "the scheduler was not built through the hooks of sglang-triattn"
        self.metrics: RoundMetrics | None = None
        self._scratch = Scratch(config)
        self._conversations = Conversations(config.conversation_ttl)
        self._admission = Admission(config, self._conversations)
        self._hooks = self._all_hooks()

    def hooks(self) -> list[Hook]:
        return self._hooks

    def _all_hooks(self) -> list[Hook]:
        target = "sglang.srt.managers.scheduler.Scheduler"
        return [
            Hook(f"{target}.__init__", "after", self._on_built, "self server_args port_args"),
            Hook(
                f"{target}.get_next_batch_to_run",
                "before",
                self._on_next_batch,
                "self running_batch last_batch",
            ),
            Hook(f"{target}.get_init_info", "after", self._on_init_info, "self"),
            *self._scratch.hooks(),
            *self._admission.hooks(),
            *positions.hooks(),
            *prefill.hooks(),
            *self._conversations.hooks(),
            *Rows(self._conversations).hooks(),
            *reporting.scheduler_hooks(self._read),
        ]

    def _on_built(self, _: Any, scheduler: Any, *__: Any, **___: Any) -> None:
        self._admission.attach(scheduler)
        self._conversations.attach(scheduler)
        try:
            check_in_place(self._hooks)
            self.compressor = build_compressor(scheduler, self.config, self._scratch.memory, self._conversations)
            self.refusal = None
        except TriAttentionError as error:
            self.refusal = str(error)
            return
        if scheduler.metrics_collector is not None:
            self.metrics = RoundMetrics(scheduler.metrics_collector.labels)
        logger.info("TriAttention is active: %s", self.compressor.config)

    def _on_next_batch(self, scheduler: Any, running_batch: Any, last_batch: Any) -> None:
        if self.compressor is None:
            return
        self._conversations.make_rows(scheduler.waiting_queue)
        if not (running_batch.reqs or scheduler.chunked_req):
            return
        self.compressor.run_due_rounds(running_batch, joining=last_batch, chunked=scheduler.chunked_req)
        if self.metrics is not None:
            self.metrics.publish(self.compressor.totals)

    def _on_init_info(self, info: dict, _: Any) -> dict:
        return {**info, handshake.KEY: handshake.answer(self.refusal)}

    def _read(self) -> tuple[Config, Totals] | None:
        return None if self.compressor is None else (self.compressor.config, self.compressor.totals)


def build_compressor(
    scheduler: Any, config: Config, memory: torch.Tensor | None, conversations: Conversations
) -> Compressor:
    """A compressor for a fully built scheduler; its config names the statistics in use.

    Args:
        memory: scratch for the scorer, see `Scratch`.

    Raises:
        TriAttentionError: the model, its KV pool or its statistics do not allow compression.
    """
    runner = scheduler.tp_worker.model_runner
    check_pool(runner)
    shape = read_shape(runner, scheduler.tp_group.world_size)
    stats = find_stats(scheduler, config.stats, shape)
    heads = own_heads(scheduler, shape)
    tables = build_tables(
        stats.mean[:, heads],
        stats.abs_mean[:, heads],
        stats.rope.inv_freq,
        stats.rope.attention_scaling,
        stats.rope.style,
        runner.token_to_kv_pool.head_num,
        runner.device,
    )
    k_buffers, _ = kv_buffers(runner.token_to_kv_pool)
    columns, longest = scored_tokens(config, runner.model_config.context_len)
    scorer = Scorer(
        k_buffers,
        tables,
        columns=columns,
        longest=longest,
        selection=config.selection,
        aggregation=config.aggregation,
        across=merge_over_ranks(scheduler, config.selection),
        memory=memory,
    )
    mover = make_mover(config, scheduler.token_to_kv_pool_allocator.page_size, runner.token_to_kv_pool)
    return Compressor(scheduler, dataclasses.replace(config, stats=stats.source), scorer, mover, conversations)
