"""Compression inside the scheduler process. SGLang part: `Scheduler` (sglang/srt/managers/scheduler.py)."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.patches.calibration.stats_source import (
    find_stats,
    has_random_weights,
    measured_stats,
    measures_together,
)
from sglang_triattn.patches.calibration.weight_updates import AFTER_UPDATE, WeightUpdates
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.hooks.registry import check_in_place, install
from sglang_triattn.patches.launch.census_switch import is_wanted
from sglang_triattn.patches.launch.handshake import answer_hook
from sglang_triattn.patches.launch.same_launch import check_same_launch, serving_hook
from sglang_triattn.patches.model import late_norm, pinned
from sglang_triattn.patches.model.buffers import kv_buffers, make_mover
from sglang_triattn.patches.model.draft import check_draft_model, make_follower
from sglang_triattn.patches.model.inspect import check_pool
from sglang_triattn.patches.model.layers import (
    attention_layers,
    check_scales,
    check_stage,
    check_windows,
    scored_layers,
)
from sglang_triattn.patches.model.served_shape import served_shape
from sglang_triattn.patches.model.workspace import Workspace
from sglang_triattn.patches.observability import metrics, notices, reporting, running
from sglang_triattn.patches.observability.census import Census
from sglang_triattn.patches.observability.stopped import StoppedGauge
from sglang_triattn.patches.ranks.pipeline import is_first, is_staged
from sglang_triattn.patches.ranks.tensor_parallel import RankMerge, agreed, merge_over_ranks, own_heads
from sglang_triattn.patches.request import (
    block_drafts,
    chunked_prefill,
    draft_reserve,
    draft_steps,
    linear_states,
    positions,
    window_pool,
)
from sglang_triattn.patches.rounds import queued_drafts, rehearsal
from sglang_triattn.patches.rounds.compressor import Compressor
from sglang_triattn.patches.scheduler.admission import Admission
from sglang_triattn.patches.scheduler.circuit_breaker import Breaker
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.disaggregation import DecodeServer
from sglang_triattn.patches.scheduler.release import Rows
from sglang_triattn.patches.scheduler.row_copy import make_copier
from sglang_triattn.rounds.plan import Totals, check_reach
from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.rounds.scoring import build_scorer, counted_from
from sglang_triattn.stats.file import QueryStats

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)


class Compression:
    """Compression in this process: the compressor that runs, or why it refused."""

    def __init__(self, config: RoundRules) -> None:
        self.config = config
        self.compressor: Compressor | None = None
        self.refusal: str | None = "the scheduler was not built through the hooks of sglang-triattn"
        self.metrics: metrics.RoundMetrics | None = None
        self._scheduler: Scheduler | None = None
        self._workspace = Workspace(config)
        self._conversations = Conversations(config.conversation_ttl)
        self._breaker = Breaker(self._on_stop)
        self._gauge: StoppedGauge | None = None
        self._merge: RankMerge | None = None
        # Nothing has been measured of the weights that the server is for.
        self._has_random_weights = False
        self._admission = Admission(config, self._conversations, self._breaker)
        self._census = Census(self._conversations) if is_wanted() else None
        self._hooks = self._all_hooks()

    def hooks(self) -> list[Hook]:
        return self._hooks

    def _all_hooks(self) -> list[Hook]:
        target = "sglang.srt.managers.scheduler.Scheduler"
        return [
            Hook(
                f"{target}.__init__",
                "after",
                self._on_built,
                "self server_args port_args",
                why="finds the statistics, builds the compressor, rehearses its rounds",
            ),
            Hook(
                f"{target}.get_next_batch_to_run",
                "before",
                self._on_next_batch,
                "self running_batch last_batch",
                why="runs the rounds that are due: the safe point",
            ),
            answer_hook(lambda: self.refusal, "answers the launch: compresses, or why not"),
            serving_hook(lambda: self.refusal),
            *late_norm.hooks(),
            *self._workspace.hooks(),
            *self._admission.hooks(),
            *positions.hooks(),
            *queued_drafts.hooks(),
            *draft_reserve.hooks(),
            *draft_steps.hooks(),
            *chunked_prefill.hooks(),
            *window_pool.hooks(),
            *linear_states.hooks(),
            *DecodeServer(lambda scheduler, batch: self._on_next_batch(scheduler, batch, scheduler.last_batch)).hooks(),
            *self._conversations.hooks(),
            *Rows(self._conversations).hooks(),
            *reporting.scheduler_hooks(self._read, self._describe, lambda: self._breaker.reason),
            *metrics.scheduler_hooks(lambda: self.metrics),
            *WeightUpdates(
                self._read, self._measures_after_update, self._measure_again, self._conversations.drop_all
            ).hooks(),
            *(self._census.hooks() if self._census is not None else ()),
        ]

    def _on_built(self, _: object, scheduler: Scheduler, *__: object, **___: object) -> None:
        self._scheduler = scheduler
        self._admission.attach(scheduler)
        self._conversations.attach(scheduler)
        try:
            self.compressor = self._start(scheduler)
            self.refusal = None
        except TriAttentionError as error:
            self.refusal = str(error)
            return
        if self._census is not None:
            self._census.attach(scheduler)
        collector = scheduler.metrics_collector
        published = scheduler.metrics_reporter.current_scheduler_metrics_enabled and scheduler.pp_group.is_first_rank
        if collector is not None and published:
            self.metrics = metrics.RoundMetrics(collector, scheduler, self.compressor, self._conversations)
            self._gauge = StoppedGauge(collector.labels)
        logger.info(notices.active(scheduler, self.compressor.config))

    def _start(self, scheduler: Scheduler) -> Compressor:
        """Builds a compressor and rehearses its rounds. Raises TriAttentionError with the message for the user."""
        check_same_launch(self.config)
        check_in_place(self._hooks)
        if scheduler.spec_algorithm.is_dflash():
            # Not registered with the others, which would import the worker in every launch.
            install(block_drafts.hooks())
        check_reach(self.config, scheduler.max_total_num_tokens, "the KV pool holds")
        self._merge = merge = merge_over_ranks(scheduler, self.config.selection)
        unknown = self.config.measures and has_random_weights(scheduler)
        self._has_random_weights = unknown and measures_together(scheduler)
        # Ranks measure together: one that fails alone cannot wait for the others, but must end.
        alone = scheduler.tp_group.world_size == 1 or not self.config.measures
        with agreement(scheduler) if alone and not is_staged(scheduler) else nullcontext():
            stats = served_stats(scheduler, self.config)
        with agreement(scheduler):
            compressor = build_compressor(
                scheduler, self.config, stats, self._workspace.memory, self._conversations, merge, self._breaker
            )
            if self.config.conversations != "off":
                kernels = rehearsal.runs_kernels(scheduler.device)
                self._conversations.copier = make_copier(scheduler, kernels=kernels)
            with nullcontext() if merge is None else merge.suspended():
                rehearsal.rehearse(scheduler, compressor, self._conversations.copier)
        if merge is not None:
            with rehearsal.in_one_sentence():
                rehearsal.rehearse(scheduler, compressor, self._conversations.copier)
        return compressor

    def _measures_after_update(self) -> bool:
        return self._has_random_weights or self.config.stats_after_update == "measure"

    def _measure_again(self) -> None:
        """Scores by statistics of the weights as they are now. Raises TriAttentionError if they cannot be measured."""
        scheduler, compressor = cast("Scheduler", self._scheduler), cast(Compressor, self.compressor)
        with rehearsal.in_one_sentence():
            shape = served_shape(scheduler)
            measured = measured_stats(scheduler, shape, AFTER_UPDATE, self.config.fits_lookups)
            stats = counted_from(measured, shape.first_position)
            compressor.take_statistics(
                make_scorer(scheduler, self.config, stats, self._workspace.memory, self._merge), stats.source
            )
        self._has_random_weights = False
        logger.info("TriAttention measured the statistics of the updated weights")

    def _on_next_batch(
        self, scheduler: Scheduler, running_batch: ScheduleBatch, last_batch: ScheduleBatch | None
    ) -> None:
        if self.compressor is None:
            return
        if self._conversations.make_rows(scheduler.waiting_queue):
            # SGLang may have closed it for want of rows.
            running_batch.batch_is_full = False
        mixed = last_batch is not None and last_batch.forward_mode.is_mixed()
        if not (running_batch.reqs or mixed or scheduler.chunked_req):
            return
        around = nullcontext() if self._census is None else self._census.around_rounds(running_batch, last_batch)
        self.compressor.run_due_rounds(running_batch, joining=last_batch, chunked=scheduler.chunked_req, around=around)
        if self.metrics is not None:
            self.metrics.after_step()

    def _on_stop(self) -> None:
        """Nothing new is compressed any more; what runs goes on with its rows."""
        self._conversations.drop_all()
        self._admission.give_up_waiting()
        if self._gauge is not None:
            self._gauge.stop()

    def _read(self) -> tuple[RoundRules, Totals] | None:
        return None if self.compressor is None else (self.compressor.config, self.compressor.totals)

    def _describe(self) -> dict[str, Any]:
        """The fields that a built scheduler adds to `/server_info`."""
        return {
            "conversations_parked": self._conversations.parked,
            "conversations_resumed": self._conversations.resumed,
            **running.describe(cast("Scheduler", self._scheduler)),
        }


@contextmanager
def agreement(scheduler: Scheduler) -> Iterator[None]:
    """Makes every rank refuse with one sentence if anything stops one of them; see `agreed`."""
    with agreed(scheduler), rehearsal.in_one_sentence():
        yield


def served_stats(scheduler: Scheduler, config: RoundRules) -> QueryStats:
    """Statistics of all layers and heads of the served model, for scores of its pool; every rank of every stage calls.

    Raises:
        TriAttentionError: the model, its KV pool or its statistics do not allow compression.
    """
    runner = scheduler.tp_worker.model_runner
    with agreed(scheduler) if is_staged(scheduler) else nullcontext():
        if is_staged(scheduler):
            check_stage(runner.model)
        check_pool(runner)
        check_draft_model(scheduler, config.window)
        check_windows(attention_layers(runner.model), config.window)
        window_pool.check_reach(scheduler, config.window)
    shape = served_shape(scheduler)
    if is_first(scheduler):
        for line in notices.at_launch(scheduler, config):
            logger.warning(line)
    if config.fits_lookups:
        # Before the model is measured, which takes a while.
        check_scales(attention_layers(runner.model))
    stats = find_stats(scheduler, config, shape)
    if stats.lookups is not None and config.value_share:
        check_scales(attention_layers(runner.model))
    if is_first(scheduler):
        for line in notices.of_stats(config, stats):
            logger.warning(line)
    return counted_from(stats, shape.first_position)


def of_own_layers(scheduler: Scheduler, stats: QueryStats) -> QueryStats:
    """The statistics of the layers that this stage runs."""
    if not is_staged(scheduler):
        return stats
    layers = scored_layers(attention_layers(scheduler.tp_worker.model_runner.model))
    return stats.of_layers([layer.number for layer in layers])


def make_scorer(
    scheduler: Scheduler, config: RoundRules, stats: QueryStats, memory: torch.Tensor | None, merge: RankMerge | None
) -> Scorer:
    """Builds the scorer of this rank's KV pool; `stats` are those of its layers, see `build_compressor` for the rest.

    Raises:
        ValueError: the kernels cannot read the KV pool, or the statistics do not fit it.
    """
    runner = scheduler.tp_worker.model_runner
    k_buffers, v_buffers = kv_buffers(runner.token_to_kv_pool, stats.layers)
    return build_scorer(
        config,
        stats,
        k_buffers,
        v_buffers,
        context=runner.model_config.context_len,
        heads=own_heads(scheduler, stats.mean.shape[1]),
        reduce_ranks=merge,
        memory=memory,
        kernels=rehearsal.runs_kernels(runner.device),
    )


def build_compressor(
    scheduler: Scheduler,
    config: RoundRules,
    stats: QueryStats,
    memory: torch.Tensor | None,
    conversations: Conversations,
    merge: RankMerge | None,
    breaker: Breaker,
) -> Compressor:
    """Builds a compressor for a fully built scheduler; its config names the statistics in use.

    Args:
        stats: from `served_stats`.
        memory: workspace for the scorer, see `Workspace`.
        merge: from `merge_over_ranks`.
        breaker: counts failed rounds.

    Raises:
        ValueError: the kernels cannot read the KV pool, or the statistics do not fit it.
    """
    runner = scheduler.tp_worker.model_runner
    stats = of_own_layers(scheduler, stats)
    scorer = make_scorer(scheduler, config, stats, memory, merge)
    kernels = rehearsal.runs_kernels(runner.device)
    # Those that decode, and one that is prefilled in chunks.
    pinned.prepare(runner.device, scheduler.max_running_requests + 1)
    page_size = scheduler.token_to_kv_pool_allocator.page_size
    mover = make_mover(config, page_size, runner.token_to_kv_pool, stats.layers, kernels=kernels)
    follower = make_follower(scheduler, kernels=kernels)
    config = dataclasses.replace(config, stats=stats.source)
    return Compressor(scheduler, config, scorer, mover, conversations, breaker, follower)
