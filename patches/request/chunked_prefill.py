"""Prefill onto a row that compaction rounds have shortened, chunk by chunk.

SGLang parts: `Scheduler.chunked_req`, `Req.init_next_round_input`, `ScheduleBatch.prepare_for_extend`,
`_compute_chunked_req_next_prompt_token` (sglang/srt/managers/schedule_batch.py).

SGLang describes a request's prefill by two numbers, where the finished part ends (`prefix_len`) and where the next
chunk ends (`extend_end`), and uses them as indices into both its token ids and its row. A round between two chunks
shortens the row, so for the rest of the prefill the ids are shortened at the front by the same number. The ids still to
be computed thus keep their places after the row. The ids before them are not used, because a row with holes never
enters the tree.

    token ids   0 .. evicted | evicted ..                done |  next chunk        (positions: their own places)
    shown ids                | 0 ..                prefix_len |  .. extend_end
    row                      | frozen | kept                  |  slots of the chunk
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch

from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.model.pinned import to_device
from sglang_triattn.patches.request.compressed import compressions_of, evicted_of
from sglang_triattn.patches.request.fields import end_of_chunk
from sglang_triattn.request.lifecycle import CompressedRequest

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

# Attribute of a Req: whether SGLang sees fewer ids than it has.
_SHORTENED = "triattention_shortened_ids"


def hooks() -> list[Hook]:
    target = "sglang.srt.managers.schedule_batch"
    return [
        Hook(
            f"{target}.Req.init_next_round_input",
            "around",
            _init_next_round,
            "self tree_cache cow_mamba",
            why="lets a prefill continue on a row that rounds have shortened",
        ),
        Hook(
            f"{target}.ScheduleBatch.prepare_for_extend",
            "after",
            _keep_logical_lengths,
            "self",
            why="keeps `orig_seq_lens` the logical lengths",
        ),
        Hook(
            f"{target}._compute_chunked_req_next_prompt_token",
            "around",
            _read_all_ids,
            "chunked_req vocab_size",
            why="gives a draft model the token after a chunk",
        ),
    ]


def _init_next_round(original: Callable, req: Req, *args: object, **kwargs: object) -> None:
    show_all_ids(req)
    original(req, *args, **kwargs)
    hide_evicted_ids(req)


def hide_evicted_ids(request: Req) -> None:
    """Hides from SGLang as many of a request's first ids as its row has evicted."""
    evicted = evicted_of(request)
    if evicted:
        request.full_untruncated_fill_ids = request.full_untruncated_fill_ids[evicted:]
        setattr(request, _SHORTENED, True)


def show_all_ids(request: Req) -> None:
    """Shows SGLang all ids of a request again."""
    if getattr(request, _SHORTENED, False):
        # SGLang completes the array by its length, which is wrong now; given an empty one it starts over.
        request.full_untruncated_fill_ids = array("q")
        setattr(request, _SHORTENED, False)


def resume_after_row(request: Req, length: int) -> None:
    """Makes the next chunk of a request start right after its row, which a round has shortened to `length` entries."""
    request.prefix_len = request.extend_end = length
    # SGLang counts tokens before a chunk as cached if the request did not compute them.
    request.already_computed = length


def keep_private(request: Req) -> None:
    """Counts the chunk just prefilled as done, without giving it to the tree."""
    request.prefix_len = end_of_chunk(request)


def _read_all_ids(original: Callable, chunked_req: Req | None, vocab_size: int) -> int | None:
    """Finds the prompt's token after a chunk: a draft model gets it with the chunk."""
    end = None if chunked_req is None else chunked_req.extend_end
    if chunked_req is None or end is None:
        return original(chunked_req, vocab_size)
    whole = SimpleNamespace(extend_end=end + evicted_of(chunked_req), origin_input_ids=chunked_req.origin_input_ids)
    return original(whole, vocab_size)


@dataclass(eq=False)
class _Evicted:
    """What `evicted_on_host` last found: a step with drafted tokens asks several times.

    Attributes:
        changes: `CompressedRequest.changes` then.
        requests: those of the batch.
        evicted: what it returned.
    """

    changes: int = -1
    requests: Sequence[Req] = ()
    evicted: list[int] | None = None


_last = _Evicted()


def evicted_on_host(batch: ScheduleBatch) -> list[int] | None:
    """Tokens evicted from each row of the batch; None if no row has lost any."""
    if _last.changes != CompressedRequest.changes or _last.requests != batch.reqs:
        _last.changes, _last.requests = CompressedRequest.changes, list(batch.reqs)
        evicted = [compression.evicted_tokens for compression in compressions_of(batch.reqs)]
        _last.evicted = evicted if any(evicted) else None
    return _last.evicted


def evicted_in(batch: ScheduleBatch) -> torch.Tensor | None:
    """`evicted_on_host` as [batch] int64 on the batch's device."""
    evicted = evicted_on_host(batch)
    return None if evicted is None else to_device(evicted, batch.seq_lens.device)


def _keep_logical_lengths(_: None, batch: ScheduleBatch) -> None:
    """Sets `orig_seq_lens` to the logical lengths, from which the positions of decoded tokens follow."""
    evicted = evicted_in(batch)
    if evicted is not None:
        batch.orig_seq_lens = (batch.seq_lens + evicted).int()
