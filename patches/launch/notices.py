"""What a user should know about a working server: one log line each, at launch or when it happens.

SGLang part: `ModelRunner.decode_cuda_graph_capture_bs` (sglang/srt/model_executor/model_runner.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_triattn.config import Config
from sglang_triattn.patches.scheduler.window_pool import row_allocator
from sglang_triattn.rounds.plan import ceil_align
from sglang_triattn.stats.concentration import SPREAD, concentration, outlook
from sglang_triattn.stats.file import QueryStats

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_parts import Scheduler

logger = logging.getLogger(__name__)


def at_launch(scheduler: Scheduler, config: Config) -> Iterator[str]:
    """Yields the lines for a built scheduler that compresses."""
    allocator = scheduler.token_to_kv_pool_allocator
    fitting = row_allocator(allocator).size // ceil_align(config.trigger(0), allocator.page_size)
    requests = min(fitting, scheduler.max_running_requests)
    graphs = scheduler.tp_worker.model_runner.decode_cuda_graph_capture_bs
    if graphs and requests > max(graphs):
        yield (
            f"TriAttention lets up to {requests} requests run at once, but decode graphs end at batches of "
            f"{max(graphs)}, and larger ones decode slower, without graphs: start with --cuda-graph-max-bs-decode "
            f"{requests}, or with --max-running-requests {max(graphs)}"
        )


def of_stats(config: Config, stats: QueryStats) -> Iterator[str]:
    """Yields the lines for statistics with which scores may predict little; none if nothing is scored."""
    if config.value_share == 1:
        return
    if stats.scored_dims < stats.head_dim:
        yield (
            f"TriAttention scores only {stats.scored_dims} of the {stats.head_dim} dims of a head: this model does not "
            f"rotate the others, and {stats.source} holds no means of them; measure the model again with "
            "`sglang-triattn calibrate`, and all dims are scored"
        )
    if concentration(stats).mean() < SPREAD:
        yield f"TriAttention: {outlook(stats)}"
