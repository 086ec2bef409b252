"""Attention by its definition: one request after the other, every score in float32, the mask written out.

Nothing here knows SGLang. What a query may see follows from four things: causality, the layer's window, the tree of
drafted tokens that a request has verified, and how long the request's row is. Sources: `RadixAttention`
(sglang/srt/layers/radix_attention.py) for the meaning of a layer's settings, and `_fwd_kernel`
(sglang/kernels/ops/attention/extend_attention.py) for how they meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Queries whose scores are in memory at once: H_q * QUERIES_AT_ONCE * keys * 4 bytes.
QUERIES_AT_ONCE = 256


@dataclass(frozen=True)
class Span:
    """One request's queries, which stand at the end of its row.

    Attributes:
        row: its line in SGLang's `req_to_token`.
        first: index of the first query within the row, which is how many tokens stand before it.
        queries: how many there are.
        tree: [queries, first + queries] bool, which of the row's tokens each query sees, where these are drafted tokens
            that form a tree; None where each query sees all tokens up to itself.
        branch: [b] int64, slots of the last b tokens that any query may see, where they are drafted in a branch of
            their own; None where all tokens are the row's.
    """

    row: int
    first: int
    queries: int
    tree: torch.Tensor | None = None
    branch: torch.Tensor | None = None

    @property
    def length(self) -> int:
        """Tokens that any query may see."""
        return self.first + self.queries

    def first_key(self, window: int) -> int:
        """Index of the oldest token that any query sees. What is older may have been freed in a window's pool."""
        return max(0, self.first - window) if window >= 0 else 0

    def visible(self, window: int = -1, *, looks_ahead: bool = False) -> torch.Tensor:
        """[queries, length - first_key(window)] bool: which tokens each query sees.

        Args:
            window: how many tokens before its own a query sees, negative for all. In a tree, the tokens of the branch
                count. SGLang's kernels count along the row instead, so later branches see fewer tokens.
            looks_ahead: whether each query sees those after its own, too, where these form no tree.
        """
        start = self.first_key(window)
        place = torch.arange(self.length)
        if self.tree is not None:
            # A drafted token sees all its ancestors and itself: their number gives its place.
            place[self.first :] = self.first - 1 + self.tree[:, self.first :].sum(1)
        query, key = place[self.first :, None], place[None, start:]
        seen = (key <= query) | looks_ahead if self.tree is None else self.tree[:, start:]
        return seen & (key >= query - window) if window >= 0 else seen


def drafted_spans(rows: Sequence[int], lengths: Sequence[int], drafted: int, mask: torch.Tensor | None) -> list[Span]:
    """The spans of requests whose drafted tokens are verified.

    Args:
        rows: lines in `req_to_token`.
        lengths: tokens before the drafted ones.
        drafted: drafted tokens of each request.
        mask: `spec_info.custom_mask`: the requests' masks [drafted, length + drafted] bool, flattened and
            concatenated, possibly with more after the last (`NgramVerifyInput` and `EagleVerifyInput`,
            sglang/srt/speculative/). None for drafts that are a chain.

    Raises:
        ValueError: the mask is too short to be laid out like this.
    """
    sizes = [drafted * (length + drafted) for length in lengths]
    if mask is None:
        return [Span(row, length, drafted) for row, length in zip(rows, lengths, strict=True)]
    if mask.numel() < sum(sizes):
        raise ValueError(
            f"A mask of {mask.numel()} entries does not cover {len(sizes)} requests' {drafted} drafted tokens, which "
            f"need {sum(sizes)}: the reference backend reads masks over whole rows."
        )
    trees = mask.flatten()[: sum(sizes)].bool().split(sizes)
    return [
        Span(row, length, drafted, tree.view(drafted, length + drafted))
        for row, length, tree in zip(rows, lengths, trees, strict=True)
    ]


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    *,
    cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """The attention of one request's queries.

    Args:
        query: [Q, H_q, D], any float dtype.
        key: [K, H_kv, D]; H_q is a multiple of H_kv, and neighbouring query heads share a KV head.
        value: [K, H_kv, D_v].
        seen: [Q, K] bool; each query sees a key, unless there are sinks.
        scale: factor of the scores.
        cap: bound of the scores, cap * tanh(score / cap); 0 for none.
        sinks: [H_q], a further score of each head that takes its share of the softmax and has no value.

    Returns:
        [Q, H_q, D_v] float32.
    """
    heads = key.shape[1]
    query = query.float().unflatten(1, (heads, -1))
    key, value = key.float(), value.float()
    parts = zip(query.split(QUERIES_AT_ONCE), seen.split(QUERIES_AT_ONCE), strict=True)
    return torch.cat([_attend(part, key, value, mask, scale, cap, sinks) for part, mask in parts]).flatten(1, 2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    seen: torch.Tensor,
    scale: float,
    cap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` of queries [Q, H_kv, H_q / H_kv, D] float32, whose heads are grouped. Returns the same with D_v."""
    scores = torch.einsum("qhgd,khd->hgqk", query, key) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    # After the cap, which would bring minus infinity back to a finite score.
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.float().view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hgqk,khd->qhgd", weights, value)
