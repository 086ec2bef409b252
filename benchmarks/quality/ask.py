"""Asks all questions of a stream in one forward pass, after what every row holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from benchmarks.quality.tokens import Asked
from sglang_triattn.transformers_cache.cache import CompactedCache

_PACK = 512


@torch.no_grad()
def ask(model: Any, cache: CompactedCache, questions: Sequence[Asked]) -> tuple[torch.Tensor, torch.Tensor]:
    """Asks all questions in one forward pass, each after what every row holds and blind to the others.

    Args:
        cache: used up; needs room for all tokens of the questions except the last of each answer.

    Returns:
        [B, questions] bool, whether every token of the answer is the most likely one, and [B, questions] float32, the
        mean log-probability of the answer's tokens.
    """
    device = model.device
    parts = [one.text + one.answer[:-1] for one in questions]
    sizes = torch.tensor([len(part) for part in parts], device=device)
    ids = torch.tensor([token for part in parts for token in part], device=device)
    owner = torch.arange(len(parts), device=device).repeat_interleave(sizes)
    first = (sizes.cumsum(0) - sizes)[owner]
    steps = torch.arange(len(ids), device=device)
    own = (owner[:, None] == owner) & (steps[:, None] >= steps)
    lengths = torch.tensor(cache.rows.lengths, device=device)
    logical = torch.tensor([cache.rows.logical_length(row) for row in range(len(lengths))], device=device)
    # Entry j of a row is question token j - (the row's length), or an entry that the row held before.
    place = torch.arange(int(lengths.max()) + len(ids), device=device) - lengths[:, None]  # [B, K]
    inside = (place >= 0) & (place < len(ids))
    seen = (place < 0)[:, None] | (inside[:, None] & own[:, place.clamp(0, len(ids) - 1)].transpose(0, 1))
    given = cache.inputs(len(ids))
    mask = given["attention_mask"].new_zeros(seen.shape)
    given["attention_mask"] = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[:, None]
    given["position_ids"] = logical[:, None] + (steps - first)
    # The logits one place earlier predict a token.
    asked = [
        range(start + len(one.text) - 1, start + len(one.text) + len(one.answer) - 1)
        for one, start in zip(questions, (sizes.cumsum(0) - sizes).tolist(), strict=True)
    ]
    wanted = torch.tensor([place for places in asked for place in places], device=device)
    targets = torch.tensor([token for one in questions for token in one.answer], device=device)
    logits = model(input_ids=ids.expand(len(lengths), -1), logits_to_keep=wanted, **given).logits
    right, logprobs = [], []
    for row in logits:
        counts = [len(one.answer) for one in questions]
        right.append([bool(hits.all()) for hits in (row.argmax(-1) == targets).split(counts)])
        logprobs.append([float(some.mean()) for some in logprobs_of(row, targets).split(counts)])
    return torch.tensor(right), torch.tensor(logprobs)


def logprobs_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Log-probabilities, [n] float32 on the CPU, of `targets` [n] under `logits` [n, vocabulary]."""
    logits = logits.float()
    return (logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)).cpu()


def packs(questions: Sequence[Asked]) -> Iterator[list[Asked]]:
    """Groups of questions of about _PACK tokens together."""
    pack: list[Asked] = []
    size = 0
    for one in questions:
        more = len(one.text) + len(one.answer)
        if pack and size + more > _PACK:
            yield pack
            pack, size = [], 0
        pack.append(one)
        size += more
    if pack:
        yield pack
