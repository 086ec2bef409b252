"""The decode server of a deployment that prefills elsewhere (--disaggregation-mode decode).

SGLang parts: `SchedulerDisaggregationDecodeMixin`, `DecodePreallocQueue` (sglang/srt/disaggregation/decode.py),
`ScheduleBatchDisaggregationDecodeMixin.prepare_for_prebuilt`, `backup_kv_cache` and `restore_kv_cache`
(sglang/srt/mem_cache/common.py).

The server admits a request by taking slots for its prompt; another server then sends the prompt's K/V. From then on the
request is compressed as usual: its rounds run before each decode step. The server reserves the slots that the request
still needs to reach its bound.

SGLang does not prefill a retracted request again here, but copies its K/V to the host, and back when there is room.
Rows and records keep the effects of earlier rounds:

    row     | kept        | queued step's token |      logical length = physical length + evicted tokens
    backup  | kept        |                            SGLang computes that token again, and draws the next one again

A round in the step of the retraction counts that token too, keeps it, and leaves it last. What is then drawn again sees
what the round has kept, as if the round had come a token earlier.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, cast

from sglang_triattn.patches.hooks.hook import Hook, replaced
from sglang_triattn.patches.ranks.pipeline import running_batches
from sglang_triattn.patches.request.batch_lengths import lengths_without
from sglang_triattn.patches.request.bounds import growth_of
from sglang_triattn.patches.request.chunked_prefill import evicted_on_host
from sglang_triattn.patches.request.compressed import compression_of, evicted_of, settings_of, write_tree_rule
from sglang_triattn.patches.scheduler.decode_windows import WindowReservation
from sglang_triattn.request.lifecycle import Stage

if TYPE_CHECKING:
    from sglang.srt.disaggregation.decode import DecodePreallocQueue, DecodeTransferQueue
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler

_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"
_CACHE = "sglang.srt.mem_cache.common"


def decodes_alone(scheduler: Scheduler) -> bool:
    """Whether another server prefills for this one."""
    from sglang.srt.disaggregation.utils import DisaggregationMode

    return scheduler.disaggregation_mode == DisaggregationMode.DECODE


def requests_in_transfer(scheduler: Scheduler) -> list[Req]:
    """Requests that hold a row for K/V that has not arrived."""
    if not decodes_alone(scheduler):
        return []
    queue = cast("DecodeTransferQueue", scheduler.disagg_decode_transfer_queue)
    held = [entry[0] for entry in queue._deferred_releases]
    return [transfer.req for transfer in (*queue.queue, *held)]


class DecodeServer:
    """Admission and retraction of a decode server.

    Args:
        on_step: called with the scheduler and its running batch before each step.
    """

    def __init__(self, on_step: Callable[[Scheduler, ScheduleBatch], None]) -> None:
        self._on_step = on_step
        # Requests of this pass over the queue, which SGLang has not put anywhere yet.
        self._admitted: list[Req] = []
        self._windows = WindowReservation(self._active)

    def hooks(self) -> list[Hook]:
        batch = "sglang.srt.disaggregation.decode_schedule_batch_mixin.ScheduleBatchDisaggregationDecodeMixin"
        cache = "req tree_cache req_to_token_pool token_to_kv_pool_allocator backend"
        return [
            *self._queue_hooks(),
            *self._windows.hooks(),
            Hook(
                f"{batch}.prepare_for_prebuilt",
                "after",
                _use_physical_lengths,
                "self",
                why="gives a joining batch the lengths of its rows",
            ),
            Hook(
                f"{_CACHE}.backup_kv_cache",
                "around",
                _back_up,
                cache,
                why="copies shortened rows of retracted requests to the host",
            ),
            Hook(f"{_CACHE}.restore_kv_cache", "around", _restore, cache, why="copies them back from the host"),
        ]

    def _queue_hooks(self) -> list[Hook]:
        mixin = "sglang.srt.disaggregation.decode.SchedulerDisaggregationDecodeMixin"
        return [
            Hook(
                f"{mixin}.get_next_disagg_decode_batch_to_run",
                "before",
                self._before_step,
                "self running_batch",
                why="runs the rounds that are due on a decode server",
            ),
            Hook(
                f"{_QUEUE}._pre_alloc",
                "after",
                self._admit,
                "self req prefix_indices prefix_len total_prefix_len",
                why="admits a request on a decode server",
            ),
            Hook(
                f"{_QUEUE}._pre_alloc_fill_len",
                "after",
                _physical_fill,
                "req",
                why="gives a retracted request a row as long as it had",
            ),
            Hook(
                f"{_QUEUE}._required_admission_tokens",
                "around",
                self._required_for_new,
                "self req allocated_tokens prefix_len retractable_tokens",
                why="reserves by the bound on a decode server",
            ),
            Hook(
                f"{_QUEUE}._prealloc_required_tokens",
                "after",
                self._required_for_retracted,
                "self req",
                why="reserves by the bound for requests that were retracted",
            ),
            Hook(
                f"{_QUEUE}._active_reserved_tokens",
                "around",
                self._reserved,
                "self n_active extra_reserved_reqs",
                why="keeps the slots that requests lack to reach their bounds",
            ),
            Hook(
                f"{_QUEUE}._need_space_for_single_req",
                "around",
                _needed_for_one,
                "self retractable_tokens",
                why="asks for no further slots for requests whose bound is reserved",
            ),
        ]

    def _before_step(self, scheduler: Scheduler, running_batch: ScheduleBatch) -> None:
        self._admitted.clear()
        self._on_step(scheduler, running_batch)

    def _admit(self, _: object, queue: DecodePreallocQueue, req: Req, *__: object, **___: object) -> None:
        self._admitted.append(req)
        compression = compression_of(req)
        if compression.settings is None:
            return
        if compression.stage is Stage.SUSPENDED:
            compression.resume()
        else:
            compression.admit(len(req.origin_input_ids), None)
        write_tree_rule(req)

    def _required_for_new(
        self,
        original: Callable,
        queue: DecodePreallocQueue,
        req: Req,
        allocated_tokens: int,
        prefix_len: int,
        retractable_tokens: int,
    ) -> int:
        self._windows.asked = req
        if settings_of(req) is None:
            return original(queue, req, allocated_tokens, prefix_len, retractable_tokens)
        return allocated_tokens + _growth_of_new(queue, req)

    def _required_for_retracted(
        self, required: tuple[int, int], queue: DecodePreallocQueue, req: Req
    ) -> tuple[int, int] | None:
        self._windows.asked = req
        if settings_of(req) is None:
            return None
        full, windows = required
        return full - queue.num_reserved_decode_tokens + _growth_of_new(queue, req), windows

    def _active(self, queue: DecodePreallocQueue) -> list[Req]:
        """The requests that hold a row."""
        scheduler = cast("Scheduler", queue.scheduler)
        return _distinct(
            *(batch.reqs for batch in running_batches(scheduler)),
            (transfer.req for transfer in queue.transfer_queue.queue if not transfer.host_staged),
            scheduler.waiting_queue,
            self._admitted,
        )

    def _reserved(
        self,
        original: Callable,
        queue: DecodePreallocQueue,
        n_active: int | None = None,
        extra_reserved_reqs: int = 0,
    ) -> int:
        """Slots reserved for the requests that hold rows: what compressed ones still need to reach their bounds."""
        active = self._active(queue)
        ours = [req for req in active if settings_of(req) is not None and req.kv.holds_kv]
        page_size = queue.token_to_kv_pool_allocator.page_size
        grown = sum(
            growth_of(req, page_size, held=req.kv.kv_allocated_len, computed=req.kv.kv_committed_len) for req in ours
        )
        # Those of `extra_reserved_reqs` are among the admitted.
        return grown + original(queue, n_active=len(active) - len(ours), extra_reserved_reqs=0)


def _distinct(*groups: Iterable[Req]) -> list[Req]:
    return list({id(req): req for group in groups for req in group}.values())


def _physical_fill(length: int, req: Req) -> int:
    """Entries of a new row: the prompt's, or those that a retracted request had."""
    return length - evicted_of(req)


def _growth_of_new(queue: DecodePreallocQueue, req: Req) -> int:
    held = queue._pre_alloc_fill_len(req)
    return growth_of(req, queue.token_to_kv_pool_allocator.page_size, held=held)


def _needed_for_one(original: Callable, queue: DecodePreallocQueue, retractable_tokens: int | None = None) -> int:
    """Slots that the largest request of the running batch must be able to get; for compressed ones all are reserved."""
    batch = queue.scheduler.running_batch
    with replaced(batch, "reqs", [req for req in batch.reqs if settings_of(req) is None]):
        return original(queue, retractable_tokens)


def _use_physical_lengths(_: None, batch: ScheduleBatch) -> None:
    """Sets a joining batch's lengths to those of its rows; `orig_seq_lens` stays the logical ones."""
    evicted = evicted_on_host(batch)
    if evicted is not None:
        lengths_without(batch, evicted).write(batch)


def _back_up(original: Callable, req: Req, *args: object, **kwargs: object) -> bool:
    """Copies a retracted request's shortened row; False if that fails, and SGLang then ends the request."""
    with _seen_by_its_row(req):
        return original(req, *args, **kwargs)


def _restore(original: Callable, req: Req, *args: object, **kwargs: object) -> None:
    with _seen_by_its_row(req):
        original(req, *args, **kwargs)


def _seen_by_its_row(req: Req) -> AbstractContextManager:
    """Context in which `req.seqlen`, by which SGLang finds the end of the row, counts no evicted tokens."""
    stack, evicted = ExitStack(), evicted_of(req)
    if evicted:
        seen = array("q", bytes(8 * (req.seqlen - evicted)))
        stack.enter_context(replaced(req, "origin_input_ids", seen))
        stack.enter_context(replaced(req, "output_ids", array("q")))
    return stack
