"""Recovery from a failure of a step's rounds: every row is as before, or complete, or its request ends with an error.

    plan, read rows, score, select   nothing has changed: the requests stay as they were, the next step tries again
    move K/V                         the launch's requests end with an error; none of their K/V enters the tree
    rewrite rows                     the rows are put back; requests whose K/V has not moved stay as they were
    free slots                       from here on rows and lengths are completed; a request without a record ends

K/V of a draft model alone, which a round may move that moves none of the model, decide no token: no request ends for
them.

A request between two chunks of its prefill ends in any case: without its round the next chunk may find no memory, which
SGLang does not survive. Once compression has stopped, so does every request with a due round: nothing else holds it to
the memory that is reserved for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sglang_triattn.kernels.mover import Mover
from sglang_triattn.patches.request.batch_lengths import BatchLengths
from sglang_triattn.patches.request.chunked_prefill import resume_after_row
from sglang_triattn.patches.request.compressed import long_enough, settings_of, write_tree_rule
from sglang_triattn.patches.request.draft_reserve import allocated_after
from sglang_triattn.patches.request.failure import end_prefill_with_error, end_with_error
from sglang_triattn.patches.request.row import CompressedRow, write_row_length
from sglang_triattn.patches.request.window_pool import set_cursor
from sglang_triattn.patches.rounds.queued_drafts import unread_of, write_unread
from sglang_triattn.patches.scheduler.circuit_breaker import Breaker, check_survivable
from sglang_triattn.rounds.plan import Plan, Totals

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo, ScheduleBatch

    from sglang_triattn.patches.rounds.launches import Launch
    from sglang_triattn.patches.sglang_types import Scheduler

MESSAGE = (
    "Compression of this request failed on the server, whose log says why, and what it had computed is lost: send the "
    "request again."
)


@dataclass(eq=False)
class Attempt:
    """The rounds of one step, and how far they have come.

    Attributes:
        running: row and plan of each round of a request that decodes.
        num_due: how many of those, the first ones, cannot wait.
        chunked: row and plan of a round between two chunks of a prefill, or None.
        launches: what the rounds were divided into; empty until their rows have been read.
        queued: whether a queued step will publish the rows' lengths as they were before, see `queued_drafts`.
        shortened: each batch in which they decode, and its lengths after the rounds.
        cursors: where the window layers' pool is freed up to after the rounds.
        moves: copies of K/V begun before each launch (`Mover.begun`).
        rewriting: whether rows are being rewritten.
        freed: whether the emptied slots have been freed.
    """

    running: Sequence[tuple[CompressedRow, Plan]]
    num_due: int
    chunked: tuple[CompressedRow, Plan] | None
    queued: bool = False
    launches: Sequence[Launch] = ()
    shortened: Sequence[tuple[ScheduleBatch, BatchLengths]] = ()
    cursors: Sequence[tuple[ReqKvInfo, int]] = ()
    moves: list[int] = field(default_factory=list)
    rewriting: bool = False
    freed: bool = False

    def __post_init__(self) -> None:
        # Settled from here, because `settle` may be called again once the lengths have changed.
        self._allocated = allocated_after(self.rounds)
        self._unread = [
            (row.request, unread_of(row.request) + plan.evicted_tokens) for row, plan in self.running if self.queued
        ]

    @property
    def rounds(self) -> list[tuple[CompressedRow, Plan]]:
        """Row and plan of each round."""
        return [*self.running] if self.chunked is None else [*self.running, self.chunked]

    def settle(self) -> None:
        """Writes the lengths that belong to the rewritten rows. Only assigns, and may be called twice."""
        for (row, plan), allocated in zip(self.rounds, self._allocated, strict=True):
            write_row_length(row.request, plan.new_length, allocated)
        for request, evicted in self._unread:
            write_unread(request, evicted)
        for kv, cursor in self.cursors:
            set_cursor(kv, cursor)
        for batch, lengths in self.shortened:
            lengths.write(batch)
        if self.chunked is not None:
            row, plan = self.chunked
            resume_after_row(row.request, plan.new_length)

    def moved(self, begun: int) -> list[Req]:
        """Requests whose K/V may have moved, if `begun` copies have begun by now."""
        launches = zip(self.launches, self.moves, [*self.moves[1:], begun], strict=False)
        return [row.request for launch, first, end in launches if end > first for row, _ in launch.rounds]


class Recovery:
    """Puts rows and requests in order after a failure.

    Args:
        breaker: counts the failures.
        totals: to which failed rounds are added.
        mover: the Mover of the rounds, or None.
    """

    def __init__(self, scheduler: Scheduler, breaker: Breaker, totals: Totals, mover: Mover | None) -> None:
        self._scheduler = scheduler
        self._breaker = breaker
        self._totals = totals
        self._mover = mover
        self._rows = scheduler.req_to_token_pool.req_to_token

    @property
    def moves_begun(self) -> int:
        """Copies of K/V begun so far."""
        return 0 if self._mover is None else self._mover.begun

    def from_plan(self, error: Exception, requests: Sequence[Req], chunked: Req | None) -> None:
        """After a failure before any round has begun; raises what the server cannot survive.

        Args:
            requests: the running requests.
            chunked: the request between two chunks of its prefill, or None.
        """
        check_survivable(self._scheduler, error)
        self._totals.failed_rounds += 1
        self._end_prefill(chunked)
        self._breaker.failed(error, "rounds of compaction could not be planned, and are tried again")
        if self._breaker.reason is not None:
            self._end([requests[index] for index in long_enough(requests)])

    def from_rounds(self, error: Exception, attempt: Attempt) -> None:
        """After a failure during rounds; raises what the server cannot survive."""
        check_survivable(self._scheduler, error)
        rounds = attempt.rounds
        chunked = None if attempt.chunked is None else attempt.chunked[0].request
        if attempt.freed:
            attempt.settle()
            unrecorded = {row.request: plan.next_position - plan.new_length - row.evicted for row, plan in rounds}
            lost = [request for request, evicted in unrecorded.items() if evicted]
            for request in lost:
                self._end([request], unrecorded[request])
            for row, _ in rounds:
                write_tree_rule(row.request)
            chunked = chunked if chunked in lost else None
        else:
            if attempt.rewriting:
                for launch in attempt.launches:
                    launch.put_back(self._rows)
            lost = attempt.moved(self.moves_begun)
            self._end(lost)
        self._end_prefill(chunked)
        self._totals.failed_rounds += len(rounds)
        self._breaker.failed(error, f"{len(rounds)} rounds of compaction failed, and {len(lost)} requests with them")
        if self._breaker.reason is not None and not attempt.freed:
            self._end([row.request for row, _ in attempt.running[: attempt.num_due]])

    def _end(self, requests: Sequence[Req], evicted: int = 0) -> None:
        """Ends requests with an error; `evicted` tokens of each are gone without a record."""
        for request in requests:
            if request.to_finish is None and not request.finished():
                end_with_error(request, MESSAGE, evicted)

    def _end_prefill(self, chunked: Req | None) -> None:
        if chunked is not None and settings_of(chunked) is not None and chunked.kv.holds_kv and not chunked.finished():
            end_prefill_with_error(self._scheduler, chunked, MESSAGE)
