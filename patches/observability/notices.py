"""What a user should know about a working server: one log line each, at launch or when it happens.

SGLang part: `ModelRunner.decode_cuda_graph_capture_bs` (sglang/srt/model_executor/model_runner.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

from sglang_triattn.config import flag
from sglang_triattn.patches.request.window_pool import row_allocator
from sglang_triattn.rounds.plan import ceil_align
from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.stats.concentration import SPREAD, concentration, outlook
from sglang_triattn.stats.file import QueryStats

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)


def active(scheduler: Scheduler, config: RoundRules) -> str:
    """One sentence on a built scheduler that compresses: what a request keeps, and what that means for the pool."""
    profile = "" if config.profile is None else f" (profile {config.profile})"
    more = f", or {config.keep_share:.0%} of them and {config.interval:,} if that is more," if config.keep_share else ""
    at_most = f"at most {config.trigger(0):,} tokens{more}"
    if config.prompt == "frozen" and config.budget_scope == "private":
        keeps = f"its prompt and {at_most} of its answer"
    else:
        keeps = f"{at_most} in addition to its shared prefix"
    return (
        f"TriAttention is active{profile}: a request keeps {keeps} (budget {config.budget:,}, interval "
        f"{config.interval:,}, newest {config.recent:,}, {config.selection}), so that a pool of "
        f"{row_allocator(scheduler.token_to_kv_pool_allocator).size:,} slots lets about "
        f"{_at_once(scheduler, config):,} requests run at once, their prompts not counted"
    )


def _at_once(scheduler: Scheduler, config: RoundRules) -> int:
    """Requests without a prompt that run at once, each at its bound."""
    allocator = scheduler.token_to_kv_pool_allocator
    fitting = row_allocator(allocator).size // ceil_align(config.trigger(0), allocator.page_size)
    return min(fitting, scheduler.max_running_requests)


def at_launch(scheduler: Scheduler, config: RoundRules) -> Iterator[str]:
    """Yields the lines for a built scheduler that compresses."""
    requests = _at_once(scheduler, config)
    graphs = scheduler.tp_worker.model_runner.decode_cuda_graph_capture_bs
    if graphs and requests > max(graphs):
        yield (
            f"TriAttention lets up to {requests} requests run at once, but decode graphs end at batches of "
            f"{max(graphs)}, and larger ones decode slower, without graphs: start with --cuda-graph-max-bs-decode "
            f"{requests}, or with --max-running-requests {max(graphs)}"
        )
    if scheduler.chunked_prefill_size is None:
        slots = row_allocator(scheduler.token_to_kv_pool_allocator).size
        yield (
            "This server prefills prompts whole, as it would a request that was retracted: its pool of "
            f"{slots:,} slots limits prompt and answer together, although rounds free slots, and a longer prompt is "
            'refused with "prompt": "compact" too; chunks (--chunked-prefill-size above 0) lift both limits'
        )


def of_stats(config: RoundRules, stats: QueryStats) -> Iterator[str]:
    """Yields the lines for statistics that are not put to use, and for those with which scores may predict little.

    The latter are none if nothing is scored.
    """
    if config.value_share == 1:
        return
    if stats.lookups is not None:
        yield (
            f"The look-up weights of {stats.source} decide {config.value_share:.0%} of the kept tokens that are not "
            f"the newest, but were measured deciding all: start with {flag('value_share')} 1"
        )
    if stats.scored_dims < stats.head_dim:
        yield (
            f"TriAttention scores only {stats.scored_dims} of the {stats.head_dim} dims of a head: this model does not "
            f"rotate the others, and {stats.source} holds no means of them; measure the model again with "
            "`sglang-triattn calibrate`, and all dims are scored"
        )
    if concentration(stats).mean() < SPREAD:
        yield f"What TriAttention's scores predict is {outlook(stats)}"
