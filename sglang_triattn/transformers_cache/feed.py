"""Feeds tokens to a `CompactedCache`: through the model, with the server's compaction rounds, or from dense K/V."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from sglang_triattn.transformers_cache.cache import CompactedCache
from sglang_triattn.transformers_cache.policy import CacheError

CHUNK = 512
"""Tokens of one forward pass, unless a round is due earlier."""


@torch.no_grad()
def forward(
    model: Any,
    cache: CompactedCache,
    ids: Sequence[int] | torch.Tensor,
    *,
    counts: Sequence[int] | None = None,
    logits: int = 1,
) -> torch.Tensor:
    """Calls the model once, on all rows; runs no round.

    Args:
        ids: [size], the same for all rows, or [B, size].
        counts: see `CompactedCache.inputs`.
        logits: number of positions at the end of `size` whose logits are returned.

    Returns:
        [B, logits, vocabulary].

    Raises:
        CacheError: ids and cache do not fit.
    """
    ids = _for_rows(cache, ids)
    size = ids.shape[1]
    if not 0 <= logits <= size:
        raise CacheError(f"logits is {logits}, but it must lie between 0 and the {size} tokens given.")
    given = cache.inputs(size, counts)
    output = model(input_ids=ids, logits_to_keep=max(logits, 1), **given)
    return output.logits[:, -max(logits, 1) :][:, :logits]


def feed(
    model: Any, cache: CompactedCache, ids: Sequence[int] | torch.Tensor, *, chunk: int = CHUNK, logits: int = 1
) -> torch.Tensor:
    """Appends tokens to all rows, with rounds where the server would run them.

    Tokens after the prompt are computed as decoded ones are: a round runs before the token that would take a row past
    its trigger. They go through the model in pieces that end where the next round of any row is due; within a piece,
    every token sees what it would see alone. Within a prompt that is to be compacted, rounds run between two chunks and
    between two calls. A round that is due at the end is left for the next token, as in the server.

    Args:
        ids: [n], the same for all rows, or [B, n].
        chunk: most tokens of one forward pass; within a prompt, the server's --chunked-prefill-size.
        logits: number of positions at the end of the n tokens whose logits are returned.

    Returns:
        [B, logits, vocabulary].

    Raises:
        CacheError: ids and cache do not fit.
    """
    ids = _for_rows(cache, ids)
    _check_chunk(chunk)
    if not 0 <= logits <= ids.shape[1]:
        raise CacheError(f"logits is {logits}, but it must lie between 0 and the {ids.shape[1]} tokens given.")
    found, start, first_wanted = [], 0, ids.shape[1] - logits
    for size in cache.rows.pieces(ids.shape[1], chunk):
        wanted = min(size, max(0, start + size - first_wanted))
        found.append(forward(model, cache, ids[:, start : start + size], logits=wanted))
        start += size
    return torch.cat(found, dim=1)


@torch.no_grad()
def compute_dense(
    model: Any, ids: Sequence[int] | torch.Tensor, *, chunk: int = CHUNK, dense: DynamicCache | None = None
) -> DynamicCache:
    """K and V of the tokens `ids` [n], each computed with all earlier ones visible, `chunk` tokens per forward pass.

    Args:
        dense: K and V of the tokens before these, to which theirs are appended; None for an empty one.

    Raises:
        CacheError: `chunk` is less than one.
    """
    _check_chunk(chunk)
    ids, dense = torch.as_tensor(ids, device=model.device).view(1, -1), DynamicCache() if dense is None else dense
    for start in range(0, ids.shape[1], chunk):
        model(input_ids=ids[:, start : start + chunk], past_key_values=dense, use_cache=True, logits_to_keep=1)
    return dense


@torch.no_grad()
def replay(cache: CompactedCache, dense: DynamicCache, until: int | None = None, *, chunk: int = CHUNK) -> None:
    """Appends tokens whose K and V are known to all rows, with rounds where `feed` runs them; the model is not called.

    The first eviction is exactly that of `feed`. Later ones may differ: here each token's K and V were computed with
    every earlier token visible, so kept tokens carry information of evicted ones; in the server they are
    computed from what is left. Scores read such keys too, so later rounds may keep other tokens. Rankings of settings
    carry over as far as that matters little; figures meant for the server need `feed`.

    Args:
        cache: empty, or filled by `replay` from the same tokens.
        dense: from `compute_dense`.
        until: how many tokens to hold in the end; all of `dense` by default.
        chunk: see `feed`.

    Raises:
        CacheError: `dense` does not reach from the cache's logical length to `until`.
    """
    _check_chunk(chunk)
    rows = cache.rows
    done = {rows.logical_length(row) for row in range(len(rows.lengths))}
    start, there = min(done), dense.get_seq_length()
    until = there if until is None else until
    if len(done) > 1 or not start <= until <= there:
        raise CacheError(f"Rows of {sorted(done)} tokens cannot be replayed to {until} of the {there} computed ones.")
    for size in rows.pieces(until - start, chunk):
        slots, span = rows.slots(size), slice(start, start + size)
        for number, layer in enumerate(cast("list[DynamicLayer]", dense.layers)):
            kv = cast("tuple[torch.Tensor, torch.Tensor]", (layer.keys, layer.values))
            rows.write(number, slots, *(part[:, :, span].expand(len(rows.lengths), -1, -1, -1) for part in kv))
        rows.advance(slots, [size] * len(rows.lengths))
        start += size


def _for_rows(cache: CompactedCache, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
    """`ids` as [B, size] int64 on the cache's device."""
    rows = len(cache.rows.lengths)
    ids = torch.as_tensor(ids, dtype=torch.int64, device=cache.rows.pools.k_buffers[0].device)
    if ids.ndim == 1:
        ids = ids.expand(rows, -1)
    if ids.ndim != 2 or ids.shape[0] != rows or not ids.shape[1]:
        raise CacheError(f"ids is of shape {list(ids.shape)}, but it must be [n] or [{rows}, n], with n at least 1.")
    return ids


def _check_chunk(chunk: int) -> None:
    if chunk < 1:
        raise CacheError(f"chunk is {chunk}, but it must be at least 1.")
