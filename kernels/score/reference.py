"""Scores of cached keys: how strongly future queries are expected to attend to each of them.

A key's score depends only on the key and on the position of the next token; no attention is computed
(arXiv 2604.04921, section 4; docs/method.md). RoPE rotates component f of a key at position p by `exp(i w_f p)`, so
the mean query of a head, rotated to a future position T + delta, meets the *cached* key without p being known:

    base(delta) = s * Re sum_f mu_f exp(i w_f (T + delta)) conj(K_f)
    extra       = s *    sum_f (a_f - |mu_f|) |K_f|
    score       = mean over delta in OFFSETS of base(delta) + extra

`K_f` is a complex component of a cached key, `mu_f` that of the mean pre-RoPE query and `a_f` the mean of its absolute
value, `w_f` the RoPE frequency and `s` RoPE's attention scaling. Only `exp(i w_f delta)` depends on delta, so
its mean `g_f` folds into `mu_f` once per model, and a head's score becomes one dot product of length 3F:

    [Re K, Im K, |K|] . [Re v, Im v, b]    with    v_f = s mu_f g_f exp(i w_f T),  b_f = s (a_f - |mu_f|)

Dims u that RoPE does not turn follow the rotated ones; their product with the key is the same from every position. So
its mean over future queries is exactly mean(q_u) . K_u, which is added once, without s: RoPE scales rotated dims alone.
With latent attention (MLA) the unturned dims are the latent c, which all heads share, and stand before the rotated
ones: q . W c is (W^T q) . c, so their mean query is that of the absorbed queries W^T q.
In a layer without RoPE nothing depends on the position: its score is mean(q) . K over the whole head, with exp() and
g_f put to 1, s to 1 and the spread to 0. Dims that are left alone between those that turn are pairs of frequency 0:
there exp() and g_f are 1, and the spread is put to 0.

Shape symbols: R requests, L layers, H_q query heads, H_kv KV heads, F frequencies (half the rotated dims), U other
dims, N keys.
"""

from collections.abc import Sequence

import torch

from sglang_triattn.kernels.score.tables import OFFSETS, ScoreTables, check_fits

WORKSPACE_BYTES = 256 << 20
"""Most device memory that a reference uses, its result not counted; keys or values are processed in pieces that fit."""

CPU_WORKSPACE_BYTES = 4 << 20
"""The same on a CPU, where pieces that stay in a core's cache are two to four times as fast as large ones."""

CHUNK = 1024
"""Tokens whose scores the kernel sums together; the last bits of the result depend on it."""


def phase_vectors(tables: ScoreTables, next_positions: torch.Tensor) -> torch.Tensor:
    """The vectors that keys are multiplied by, `[Re v, Im v, b, mean(q_u)]` per request, layer and query head.

    Args:
        next_positions: [R] int64 on the tables' device: T, the logical position of each request's next token.

    Returns:
        [R, L, H_q, 3F + U] float32; phases are computed in float64.
    """
    turned = _turn(tables.center, tables, next_positions)
    fixed = torch.cat([tables.spread, tables.unrotated], dim=-1)
    return torch.cat([turned, fixed.expand(turned.shape[0], -1, -1, -1)], dim=-1)


def phase_rows(
    tables: ScoreTables, next_positions: torch.Tensor, aggregation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Cos and sin of the phases at the query positions, [R, O, 2, F] float32, in `out` if given; computed in float64.

    O is 1, or one per offset for "max". For "norm" all are zero, which drops the trigonometric term. They are those of
    layers with RoPE.
    """
    positions = next_positions.to(torch.float64)[:, None]
    if aggregation == "max":
        positions = positions + tables.offsets
    angles = positions[..., None] * tables.inv_freq
    if out is None:
        out = tables.spread.new_empty((*angles.shape[:2], 2, angles.shape[2]))
    return out.zero_() if aggregation == "norm" else out.copy_(torch.stack([angles.cos(), angles.sin()], dim=2))


def score_torch(
    k_buffers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    next_positions: torch.Tensor,
    tables: ScoreTables,
    *,
    aggregation: str = "mean",
) -> torch.Tensor:
    """Scores of the private tokens of R requests for all layers and query heads; higher is more important.

    Args:
        k_buffers: per layer [num_slots, H_kv, head_dim], the pool of post-RoPE keys in bf16, fp16, fp32 or
            float8. Keys divided by a constant give scores divided by it, which changes no selection.
        slots: [R, N] int64, private slots of each request in row order, right-padded with any valid slot.
            Scores of padded columns are meaningless.
        next_positions: [R] int64, see `phase_vectors`.
        aggregation: over OFFSETS, "mean" (the paper's) or "max"; "norm" leaves only the spread term, so it drops what
            follows from the mean query, in rotated and other dims.

    Returns:
        [R, L, H_q, N] float32.

    Raises:
        ValueError: `check_fits` refuses.
    """
    check_fits(k_buffers, tables, aggregation)
    layers, q_heads, _ = tables.spread.shape
    requests, num_tokens = slots.shape
    scores = slots.new_empty((requests, layers, q_heads, num_tokens), dtype=torch.float32)
    layer_step, column_step = _pieces(k_buffers[0], tables, requests, num_tokens)
    vectors = phase_vectors(tables, next_positions) if aggregation == "mean" else None
    for first in range(0, layers, layer_step):
        group = slice(first, min(first + layer_step, layers))
        for start in range(0, num_tokens, column_step):
            span = slice(start, min(start + column_step, num_tokens))
            features = _features(k_buffers[group], slots[:, span], tables)
            if vectors is not None:
                piece = _project(vectors[:, group], features)
            else:
                piece = _without_collapse(tables, group, next_positions, features, aggregation)
            scores[:, group, :, span] = piece
    return scores


def workspace_bytes(pool: torch.Tensor) -> int:
    """Bytes that a reference may use in addition to its result, on the pool's device."""
    return CPU_WORKSPACE_BYTES if pool.device.type == "cpu" else WORKSPACE_BYTES


def gather_slots(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Gathers `slots` [n] from a pool [num_slots, ...] of any dtype."""
    if pool.element_size() > 1:
        return pool.index_select(0, slots)
    # Every device can gather bytes; not all can gather float8.
    return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)


def _turn(coefficients: torch.Tensor, tables: ScoreTables, positions: torch.Tensor) -> torch.Tensor:
    """`coefficients` [L, H_q, F] complex64 rotated to `positions` [R]: [R, L, H_q, 2F] float32, [Re, Im].

    `tables` are those of the same layers; the ones without RoPE are not rotated.
    """
    angles = (positions.to(torch.float64)[:, None] * tables.inv_freq)[:, None] * tables.rotates[:, None]  # [R, L, F]
    unit = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    turned = coefficients * unit[:, :, None, :]
    return torch.cat([turned.real, turned.imag], dim=-1)


def _pieces(pool: torch.Tensor, tables: ScoreTables, requests: int, num_tokens: int) -> tuple[int, int]:
    """How many layers and how many columns to process at once so that the workspace stays within bounds."""
    limit = workspace_bytes(pool)
    _, q_heads, frequencies = tables.spread.shape
    # Held for every layer of a piece: the features and two results (17 offsets keep a running maximum).
    held = requests * 4 * (tables.num_kv_heads * (3 * frequencies + tables.unrotated.shape[-1]) + 2 * q_heads)
    # Held for one layer at a time: the gathered keys.
    gathered = requests * tables.num_kv_heads * pool.shape[-1] * pool.element_size()
    column_step = max(1, min(num_tokens, limit // (held + gathered)))
    layer_step = max(1, (limit - gathered * column_step) // (held * column_step))
    return layer_step, column_step


def _features(pools: Sequence[torch.Tensor], slots: torch.Tensor, tables: ScoreTables) -> torch.Tensor:
    """Key features [Re K, Im K, |K|, K_u] of a piece: [layers, R, H_kv, N, 3F + U] float32."""
    requests, num_tokens = slots.shape
    half, others = tables.inv_freq.numel(), tables.unrotated.shape[-1]
    flat = slots.reshape(-1)
    shape = (len(pools), requests, tables.num_kv_heads, num_tokens, 3 * half + others)
    features = slots.new_empty(shape, dtype=torch.float32)
    for target, pool in zip(features, pools, strict=True):
        whole = gather_slots(pool, flat).unflatten(0, (requests, num_tokens)).transpose(1, 2)
        begin = tables.rotary_start
        keys = whole[..., begin : begin + tables.rotary_dim]
        if tables.style == "half":
            target[..., : 2 * half].copy_(keys)
        else:
            target[..., :half].copy_(keys[..., 0::2])
            target[..., half : 2 * half].copy_(keys[..., 1::2])
        if others:
            target[..., 3 * half :].copy_(whole[..., :begin] if begin else whole[..., tables.rotary_dim :])
    real, imag, size = features[..., : 3 * half].unflatten(-1, (3, half)).unbind(-2)
    torch.mul(real, real, out=size)
    size.addcmul_(imag, imag).sqrt_()
    return features


def _project(vectors: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Projects vectors [R, layers, H_q, K] on features [layers, R, H_kv, N, K]: [R, layers, H_q, N].

    The query heads of a group are rows of one matrix product with their KV head's keys, so no key is repeated.
    """
    grouped = vectors.unflatten(2, (features.shape[2], -1)).transpose(0, 1)  # [layers, R, H_kv, G, K]
    return torch.matmul(grouped, features.transpose(-1, -2)).flatten(2, 3).transpose(0, 1)


def _without_collapse(
    tables: ScoreTables, group: slice, next_positions: torch.Tensor, features: torch.Tensor, aggregation: str
) -> torch.Tensor:
    """Scores [R, layers, H_q, N] of a piece whose offsets do not fold into one vector."""
    half, own = tables.inv_freq.numel(), tables[group]
    fixed = [own.spread] if aggregation == "norm" else [own.spread, own.unrotated]
    vector = torch.cat(fixed, dim=-1).expand(next_positions.shape[0], -1, -1, -1)
    extra = _project(vector, features[..., 2 * half : 2 * half + vector.shape[-1]])
    if aggregation == "norm":
        return extra
    best = torch.full_like(extra, float("-inf"))
    for offset in OFFSETS:
        vectors = _turn(own.mean, own, next_positions + offset)
        torch.maximum(best, _project(vectors, features[..., : 2 * half]), out=best)
    return best.add_(extra)
