"""Compaction rounds on a running batch.

SGLang parts: the scheduler's streams and batch, row table, KV pool, allocator.

The safe point is the entry of `Scheduler.get_next_batch_to_run` for step n+1. There, with overlap scheduling,

- the result of step n-1 has been processed, so prompts are in the tree and finished requests are marked;
- step n is queued on the forward stream. It reads the rows' slots as they were, and writes its newest token's K/V when
  it runs. If it verifies drafts, how many of them hold is not yet known: its tokens are not counted, and their slots
  stay (`queued_drafts`). Everything that reads or writes K/V is therefore enqueued on the forward stream too, after
  step n and before step n+1;
- the schedule stream may rewrite a row as soon as step n has read it, which SGLang's own barrier has awaited
  (`Scheduler._apply_war_barrier`). What a round needs of the row is copied on the schedule stream first;
- freed slots may be handed out at once: whoever gets them writes them on the forward stream, in a later step, or, if a
  prompt comes back from host memory, on a stream that first waits for it (`HiCacheController.start_loading`);
- a decode server's slots are also written by a prefill server, over the network, and a retracted request's are copied
  to the host, on a stream that waits for the schedule stream alone (`UnifiedRadixCache.backup_kv_cache`). Both read
  rows that the schedule stream has written, so there it waits for the rounds before it rewrites any.

Without overlap there is one stream, in program order. Only token counts steer rounds: nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from sglang_triattn.kernels.compact.reference import STRATEGIES
from sglang_triattn.kernels.device_round import compact_rows
from sglang_triattn.kernels.follower import Follower
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.round_times import Untimed
from sglang_triattn.kernels.scorer import Scorer, WorkspacePlan
from sglang_triattn.patches.model.pinned import read_later
from sglang_triattn.patches.ranks.pipeline import (
    after_queued_step,
    has_forward_stream,
    is_staged,
    keeps_equal_sets,
    lend,
)
from sglang_triattn.patches.request.batch_lengths import shortened
from sglang_triattn.patches.request.bounds import reserved_of
from sglang_triattn.patches.request.compressed import compression_of, may_be_due
from sglang_triattn.patches.request.draft_reserve import tokens_per_step
from sglang_triattn.patches.request.fields import decoded_in, end_of_chunk
from sglang_triattn.patches.request.integrity import all_or_nothing, unbroken
from sglang_triattn.patches.request.row import CompressedRow, compactable_row
from sglang_triattn.patches.request.window_pool import WindowPool, has_window_pool, row_allocator
from sglang_triattn.patches.rounds.due import DueLooks
from sglang_triattn.patches.rounds.launches import Launch, RoundShape, shape_for, snapshot
from sglang_triattn.patches.rounds.leveller import Leveller
from sglang_triattn.patches.rounds.memory_pressure import early_rounds
from sglang_triattn.patches.rounds.queued_drafts import queues_drafts
from sglang_triattn.patches.rounds.recovery import Attempt, Recovery
from sglang_triattn.patches.rounds.window_peers import free_peers
from sglang_triattn.patches.scheduler.circuit_breaker import Breaker
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.disaggregation import decodes_alone
from sglang_triattn.request.lifecycle import FirstEvicted
from sglang_triattn.rounds.plan import Plan, Totals, plan_eviction, plan_round
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_triattn.patches.sglang_types import Scheduler


class Compressor:
    """Compacts the due requests of a scheduler, all of them in one pass.

    Args:
        scheduler: SGLang's Scheduler, fully built.
        config: the server's settings.
        scorer: reads the keys of the scheduler's KV pool.
        mover: moves K/V in that pool; None if rounds only rewrite rows, see `buffers.make_mover`.
        conversations: idle rows, which give way to running requests.
        breaker: counts failures; by default one of its own.
        follower: moves K/V of the draft model, which shares rows and slots; None without one.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: RoundRules,
        scorer: Scorer,
        mover: Mover | None,
        conversations: Conversations,
        breaker: Breaker | None = None,
        follower: Follower | None = None,
    ) -> None:
        self.config = config
        self.totals = Totals()
        self.times = Untimed()
        self.breaker = breaker or Breaker()
        self._recovery = Recovery(scheduler, self.breaker, self.totals, mover)
        self._scheduler = scheduler
        self._scorer = scorer
        self._allocator = row_allocator(scheduler.token_to_kv_pool_allocator)
        self._windows = WindowPool(scheduler) if has_window_pool(scheduler) else None
        self._rows = scheduler.req_to_token_pool.req_to_token
        self._page_size = self._allocator.page_size
        self._mover, self._follower = mover, follower
        self._conversations = conversations
        self._equal_on_ranks = keeps_equal_sets(scheduler, config.selection)
        self._queues_drafts = queues_drafts(scheduler)
        self._looks = DueLooks(tokens_per_step(scheduler))
        self._leveller = Leveller(config, tokens_per_step(scheduler))
        self._decodes_alone = decodes_alone(scheduler)
        # A stage's chunk may still be reading its row; for a decode server see above.
        self._rewrites_late = is_staged(scheduler) or self._decodes_alone

    @property
    def strategies(self) -> tuple[str, ...]:
        """Strategies that rounds may use; if K/V moves, `shape_for` chooses among them."""
        if self._mover is None:
            return ("remap",)
        return ("slide",) if self.config.recency else STRATEGIES

    @property
    def device(self) -> torch.device:
        """Device of the rows and K/V."""
        return self._rows.device

    @property
    def windows(self) -> WindowPool | None:
        """The window layers' pool, if they have one of their own."""
        return self._windows

    @property
    def workspace_plan(self) -> WorkspacePlan:
        """What one launch of the kernels can hold; only if there are kernels."""
        return self._scorer.plan

    def take_statistics(self, scorer: Scorer, source: str) -> None:
        """Scores by other statistics from the next round on.

        Args:
            scorer: reads the same KV pool.
            source: where the statistics come from, for messages.
        """
        self._scorer = scorer
        self.config = dataclasses.replace(self.config, stats=source)

    def run_due_rounds(
        self,
        batch: ScheduleBatch,
        *,
        joining: ScheduleBatch | None = None,
        chunked: Req | None = None,
        around: AbstractContextManager = nullcontext(),  # noqa: B008
    ) -> None:
        """Runs one round for every request that has outgrown its budget, or that must make room.

        If that fails, see `recovery`; raises only what the server cannot survive.

        Args:
            batch: SGLang's running ScheduleBatch.
            joining: the batch that was prefilled last and is about to join it, or None.
            chunked: the request whose prompt is prefilled chunk by chunk, or None.
            around: a context to run planned rounds in; not entered if there are none.
        """
        self._conversations.finish_copies()
        # In a mixed batch, decoding requests are not part of the running batch.
        joined = decoded_in(joining) if joining is not None and joining.forward_mode.is_mixed() else []
        requests = [*batch.reqs, *joined] if joined else batch.reqs
        try:
            attempt = self._plan_step(requests, joining, chunked)
        except Exception as error:
            self._looks.forget()
            self._recovery.from_plan(error, requests, chunked)
            return
        if attempt is None:
            return
        rounds = attempt.rounds
        # SGLang reopens admission only when a request leaves. Usually a round gives a waiting request nothing: the
        # slots it frees stay reserved for the same request's growth.
        closed = batch.batch_is_full
        reserved = sum(reserved_of(row) for row, _ in rounds) if closed else 0
        batches = [each for each in (batch, joining if joined else None) if each is not None and each.reqs]
        with around, self.times.host():
            try:
                self._compact(attempt, batches)
            except Exception as error:
                self._recovery.from_rounds(error, attempt)
            else:
                self.breaker.succeeded()
        if closed and sum(reserved_of(row) for row, _ in rounds) < reserved:
            batch.batch_is_full = False

    def _plan_step(self, requests: Sequence[Req], joining: ScheduleBatch | None, chunked: Req | None) -> Attempt | None:
        """The rounds of this step; None if there are none."""
        due = self._plan(requests)
        if self.breaker.reason is None:
            due += self._plan_early(requests, len(due))
        num_due = len(due)  # rounds for want of memory can wait
        pressed = early_rounds(self._scheduler, requests, joining, due, self._conversations.drop_one, self._windows)
        if self.breaker.reason is None:
            due += pressed
        prefill = self._plan_chunked(chunked)
        return Attempt(due, num_due, prefill, self._queues_drafts) if due or prefill else None

    def _shape_of(self, row: CompressedRow, plan: Plan) -> RoundShape:
        recent, moves, ordered = row.recent(plan), self._mover is not None, self._decodes_alone
        # A retraction in this step would drop the last entry of the row, see `disaggregation`.
        recent = max(recent, 1) if ordered else recent
        return shape_for(row.settings, plan, recent, moves=moves, page_size=self._page_size, ordered=ordered)

    def _compact(self, attempt: Attempt, batches: Sequence[ScheduleBatch]) -> None:
        """Runs the rounds of a step; however many launches they take, each stream waits for the other once.

        What allocates comes before the slots are freed, so that hardly anything can fail afterwards.
        """
        launches = attempt.launches = snapshot(self._rows, attempt.rounds, self._shape_of, self._page_size)
        attempt.shortened = [(batch, shortened(batch, attempt.running)) for batch in batches if attempt.running]
        if self._windows is not None:
            attempt.cursors = free_peers(self._windows, launches)
        done, borrowed = [], [part for launch in launches for part in (launch.slots, launch.row_info)]
        with after_queued_step(self._scheduler, *borrowed), self.times.device():
            for launch in launches:
                attempt.moves.append(self._recovery.moves_begun)
                done.append(self.score_and_move(launch))
            positions = read_later(torch.cat([first for _, first in done]))
        self._give_back(attempt, [ordered for ordered, _ in done])
        attempt.settle()
        self.totals.pressure_rounds += len(attempt.running) - attempt.num_due
        members = [(launch.shape, *member) for launch in launches for member in launch.rounds]
        for place, (shape, row, plan) in enumerate(members):
            self._record(row, plan, shape, lambda place=place: positions()[place])

    def score_and_move(self, launch: Launch) -> tuple[torch.Tensor, torch.Tensor]:
        """Finds what stays, and moves its K/V if the round moves any; runs on the forward stream.

        Returns:
            [R, N] int32: each round's slots, for "remap" with those that stay first, else unchanged; [R] int64: the
            first position of each row that will no longer hold its original token.
        """
        shape, slots, (_, frozen, lengths, next_positions) = launch.shape, launch.slots, launch.row_info
        unchanged, ordered = compact_rows(
            self._scorer, self._mover, slots, lengths, next_positions,
            shape.num_kept, shape.recent, shape.strategy, shape.cut, self._follower,
        )  # fmt: skip
        return slots if ordered is None else ordered, frozen + unchanged

    def _give_back(self, attempt: Attempt, ordered: Sequence[torch.Tensor]) -> None:
        """Removes the emptied slots from the rows, and frees them."""
        pairs = list(zip(attempt.launches, ordered, strict=True))
        # For the other strategies, the host knows which slots are emptied.
        remapped = [slots for launch, slots in pairs if launch.shape.strategy == "remap"]
        if remapped or self._rewrites_late:
            self._await_forward_stream(*remapped)
        attempt.rewriting = True
        for launch, slots in pairs:
            launch.close_up(self._rows, slots)
        page_size = self._page_size
        freed = torch.cat([page for launch, slots in pairs for page in launch.emptied(slots, page_size)]).long()
        with all_or_nothing(self._allocator.available_size):
            self._allocator.free_page_ids(freed if page_size == 1 else freed // page_size)
        attempt.freed = True

    def _plan(self, requests: Sequence[Req]) -> list[tuple[CompressedRow, Plan]]:
        """Row and plan of each due round."""
        due = []
        for index in self._looks.of_step(requests):
            request = requests[index]
            compression, left = compression_of(request), 0
            if compression.settings is None:
                continue
            if not may_be_due(request, compression):
                left = compression.due_len - request.kv.kv_committed_len
            elif (row := compactable_row(request, self._page_size)) is not None:
                plan = plan_round(row.settings, **row.lengths())
                if plan is None:
                    row.wait_until_due()
                    left = compression.due_len - request.kv.kv_committed_len
                else:
                    due.append((row, plan))
            self._looks.again(request, left)
        return due

    def _plan_early(self, requests: Sequence[Req], num_due: int) -> list[tuple[CompressedRow, Plan]]:
        """Row and plan of each first round that comes early, so that few rounds meet in one step."""
        early = self._leveller.early(requests, num_due, joined=self._looks.changed)
        rows = (compactable_row(requests[index], self._page_size) for index in early)
        plans = [(row, plan_eviction(row.settings, **row.lengths())) for row in rows if row is not None]
        return [(row, plan) for row, plan in plans if plan is not None]

    def _plan_chunked(self, request: Req | None) -> tuple[CompressedRow, Plan] | None:
        """Plans the round that is due between two chunks of a prefill; None if none is.

        It first gives the tree what it may take of the row, as SGLang would later in the same step.
        """
        row = None if request is None else compactable_row(request, self._page_size, in_prefill=True)
        if row is None or end_of_chunk(row.request) <= row.request.prefix_len:
            return None
        if plan_round(row.settings, **row.lengths()) is None:
            return None
        with unbroken("a chunk of a prefill has entered the tree"):
            self._scheduler.stash_chunked_request(row.request)
        # The tree may have taken tokens that counted as private.
        plan = plan_round(row.settings, **row.lengths())
        return None if plan is None else (row, plan)

    def _record(self, row: CompressedRow, plan: Plan, shape: RoundShape, first_evicted: FirstEvicted) -> None:
        """Records the round with its request, and adds it to the sums."""
        unordered_len = shape.unordered_len(plan, row.compression.held_record.unordered_before(plan))
        row.record(plan, first_evicted if self._equal_on_ranks else lambda: 0, unordered_len, shape.tail(plan))
        moved = 0 if self._mover is None else shape.most_moves(plan) * self._mover.token_bytes
        if self._follower is not None:
            followed = shape.most_followed(plan, ahead=self._follower.ahead)
            moved += followed * self._follower.mover.token_bytes
        self.totals.add(plan, moved)

    def _await_forward_stream(self, *borrowed: torch.Tensor) -> None:
        """Lets the schedule stream use tensors made on the forward stream."""
        scheduler = self._scheduler
        if not has_forward_stream(scheduler):
            return
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        lend(scheduler.schedule_stream, *borrowed)
