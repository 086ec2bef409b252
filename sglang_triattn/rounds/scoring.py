"""Builds the Scorer for given settings and statistics, in the server and outside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

from sglang_triattn.kernels.score.tables import ScoreTables, build_tables
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.model.rope import Rope
from sglang_triattn.rounds.plan import most_kept, scored_tokens
from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.stats.file import QueryStats


def score_tables(
    stats: QueryStats, num_kv_heads: int, device: torch.device | str, heads: slice = slice(None)
) -> ScoreTables:
    """The constants of a model's scores, for some or all of its query heads; arguments as for `build_scorer`."""
    rope = cast(Rope, stats.rope)
    return build_tables(
        stats.mean[:, heads],
        stats.abs_mean[:, heads],
        rope.inv_freq,
        rope.attention_scaling,
        rope.style,
        num_kv_heads,
        device,
        unrotated=None if stats.unrotated_mean is None else stats.unrotated_mean[:, heads],
        rotates=stats.rotates,
        rotary_start=stats.rotary_start,
    )


def lookup_weights(
    stats: QueryStats, num_kv_heads: int, device: torch.device | str, heads: slice = slice(None)
) -> torch.Tensor | None:
    """The look-up weights of the KV heads of some or all query heads; arguments as for `build_scorer`."""
    if stats.lookups is None:
        return None
    group = stats.mean.shape[1] // stats.lookups.shape[1]
    first = (heads.start or 0) // group
    return stats.lookups[:, first : first + num_kv_heads].float().contiguous().to(device)


def counted_from(stats: QueryStats, first_position: int) -> QueryStats:
    """Statistics for a pool in which a text's first key is turned by `first_position` instead of 0.

    Scores take the next token's place in the text for its position. The mean queries are turned by what is missing.
    """
    rope = cast(Rope, stats.rope)
    turns = torch.tensor(stats.rotates)[:, None, None] * first_position
    angles = turns * rope.inv_freq.to(stats.mean.device)
    mean = stats.mean * torch.polar(torch.ones_like(angles), angles)
    return replace(stats, mean=mean.to(stats.mean.dtype)) if first_position else stats


def build_scorer(
    config: RoundRules,
    stats: QueryStats,
    k_buffers: Sequence[torch.Tensor],
    v_buffers: Sequence[torch.Tensor],
    *,
    context: int,
    heads: slice = slice(None),
    reduce_ranks: Callable[[torch.Tensor], torch.Tensor] | None = None,
    memory: torch.Tensor | None = None,
    kernels: bool | None = None,
) -> Scorer:
    """Builds the Scorer of a KV pool under these settings.

    Args:
        stats: statistics of the whole model, checked against it by `check_stats`.
        k_buffers: per scored layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys.
        v_buffers: per layer [num_slots, H_kv, head_dim], the pool of values; read unless `config.value_share` is 0.
        context: most tokens of a request.
        heads: the query heads whose keys the pool holds; all of them except under tensor parallelism.
        reduce_ranks, memory, kernels: see `Scorer`.

    Raises:
        ValueError: the statistics do not fit the pool, or the kernels cannot read it.
    """
    tables = score_tables(stats, k_buffers[0].shape[1], k_buffers[0].device, heads)
    num_tokens, longest = scored_tokens(config, context)
    return Scorer(
        k_buffers,
        tables,
        num_tokens=num_tokens,
        longest=longest,
        most_kept=most_kept(config, context),
        selection=config.selection,
        aggregation=config.aggregation,
        v_buffers=v_buffers,
        value_share=config.value_share,
        lookups=lookup_weights(stats, k_buffers[0].shape[1], k_buffers[0].device, heads)
        if config.value_share
        else None,
        recency=config.recency,
        reduce_ranks=reduce_ranks,
        memory=memory,
        kernels=kernels,
    )
