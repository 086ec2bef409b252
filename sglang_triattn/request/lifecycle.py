"""The life of a compressed request: who owns which part of its row, and what the radix tree may take of it.

                 +------------------------- retract -------------------------+
                 v                                                           |
    arrive -> ARRIVED ------------------ admit -----------------------> ADMITTED -- publish -> PUBLISHED
                 |  ^                                                     ^   ^ |
              acquire  rollback                                        admit  | +-- park ----> PARKED
                 v  |                                                     |  round
              ACQUIRED ---------------------------------------------------+
                                                    ADMITTED -- suspend -> SUSPENDED -- resume -> ADMITTED

A request's row, in KV entries:

    0          protected         frozen           first evicted                    physical
    |-- tree ----|--- request -----|--- private, exact --|--- private, holes before it ---|
     shared, locked  a withheld prompt  at its logical place   rotated at its own logical position

- [0, protected) belongs to the radix tree; the request holds a lock on it.
- [protected, physical) belongs to the request; compaction rounds touch nothing before `frozen` (`plan.frozen_length`).
- Evicted tokens have no owner: their slots go back to the allocator in the same step.

Only exact K/V, which the token ids alone determine, may enter the tree: the whole row if nothing was evicted, else the
entries before the first evicted position. Anything computed after an eviction attended to a row with holes.

This module knows nothing of SGLang, tensors or devices. `patches/request/` applies the effects of a transition to
SGLang's request.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Any, cast

from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.request.row_record import FirstEvicted, RowRecord
from sglang_triattn.rounds.plan import Plan, Report
from sglang_triattn.rounds.rules import RoundRules

NEW, RESUMED, LOST, DIVERGED = "new", "resumed", "lost", "diverged"
"""How a conversation's turn started."""


class LifecycleError(RuntimeError):
    """A transition called in the wrong stage; a bug in this package."""


class Stage(Enum):
    """The stage of a request's life."""

    ARRIVED = "waits without a row"
    SUSPENDED = "waits while the host has a copy of its row"
    ACQUIRED = "waits with its conversation's row, for one attempt at admission"
    ADMITTED = "holds a row"
    PARKED = "left its row to its conversation"
    PUBLISHED = "gave its row back"


class CompressedRequest:
    """One request, from arrival to end.

    Attributes:
        options: its options; `options.settings` is None if it is not compressed.
        withheld: whether its row stays out of the tree, because SGLang says so or a round failed.
        reserve: slots that its row has after its computed entries while it decodes, for drafted tokens; 0 without
            speculative decoding.
        stage: its current stage.
        record: record of the row it holds; None without a row.
        rounds, freed_slots: counts since its last admission.
        start: how its conversation started; None before its first admission, or without a conversation.
        kept: whether its row waits for the conversation's next turn.
        arrived_at: arrival time, in seconds of the scheduler's clock; None without a name.
        replaces: the idle row that its own is to replace once it has been answered: a copy of the one it has resumed,
            or the one of its name that it could not resume.
        block_hashes: those of its prompt, see `row_index`; None until they are asked for.
        report: what compression did to it; set when it gives its row back.
        due_len, due_protected: no round is due before the row has `due_len` entries, while the tree owns
            `due_protected` of them.
        bound, bound_protected, bound_limit: most entries that the row can have while the tree owns `bound_protected` of
            them and the answer may have `bound_limit` tokens; `bound_protected` is -1 while that is not known.

    Raises:
        LifecycleError: from every transition called in the wrong stage.
    """

    changes = 0
    """How often the row of any request has changed by a round or a transition, in this process."""
    rows = 0
    """How often any request has got a row."""
    releases = 0
    """How often any request has given its row back, compressed or not, or has been asked to."""

    def __init__(self, options: CompressionOptions, *, withheld: bool, reserve: int = 0) -> None:
        """arrive: the request owns nothing, and the tree keeps what it has."""
        self.options = options
        self.withheld = withheld
        self.reserve = reserve
        self.stage = Stage.ARRIVED
        self.record: RowRecord | None = None
        self.rounds = self.freed_slots = 0
        self.start: str | None = None
        self.kept = False
        self.arrived_at: float | None = None
        self.replaces: Any = None
        self.block_hashes: list[int] | None = None
        self.report: Report | None = None
        self._inherited = False
        self._evicted_before = 0
        self._published: int | None = None
        self.due_len, self.due_protected = 0, -1
        self.bound, self.bound_protected, self.bound_limit = 0, -1, 0

    @property
    def settings(self) -> RoundRules | None:
        """The request's settings; None if it is not compressed."""
        return self.options.settings

    @property
    def held_record(self) -> RowRecord:
        """The record of a request that holds a row."""
        return cast(RowRecord, self.record)

    @property
    def conversation(self) -> str | None:
        """The name under which its row is kept, if any."""
        return self.options.conversation

    @property
    def keeps_row(self) -> bool:
        """Whether its row may wait for a next turn, under a name or to be found by its tokens."""
        return self.options.conversation is not None or self.options.auto

    @property
    def evicted_tokens(self) -> int:
        """Tokens evicted from the row it holds, those of a conversation's earlier turns included."""
        return 0 if self.record is None else self.record.evicted_tokens

    @property
    def own_evicted_tokens(self) -> int:
        """Those of them that its own rounds evicted."""
        return self.evicted_tokens - self._evicted_before

    # What may enter the tree

    @property
    def tree_may_take_all(self) -> bool:
        """Whether SGLang may give the whole row to the tree on its own, now or when it releases the row.

        A prompt that is to be compacted stays out while its request runs, because the tree would freeze it.
        """
        if self.withheld or self.evicted_tokens:
            return False
        if self.stage is Stage.PUBLISHED:
            return self._published is None
        return not (self._inherited or self._compacts_prompt)

    @property
    def _compacts_prompt(self) -> bool:
        return self.settings is not None and self.settings.prompt == "compact"

    # Transitions

    def compact_prompt(self) -> None:
        """Before admission: has its prompt compacted after all, because the pool cannot hold all of it."""
        self._leave(Stage.ARRIVED)
        self._row_changes()
        settings = cast(RoundRules, self.settings)
        # What a resumed turn adds is not what does not fit.
        inputs = "keep" if settings.keeps_inputs else "compact"
        self.options = replace(self.options, settings=replace(settings, prompt="compact", turn_inputs=inputs))

    def acquire(self, record: RowRecord) -> None:
        """ARRIVED -> ACQUIRED: it takes its conversation's row for one attempt at admission.

            0          protected        physical
            |-- tree ----|-- conversation --|        locked by the conversation

        The conversation keeps `record`; the request gets a copy.
        """
        self._leave(Stage.ARRIVED)
        self._begin(replace(record), inherited=True)
        self.stage = Stage.ACQUIRED

    def rollback(self) -> None:
        """ACQUIRED -> ARRIVED: it was not admitted, and the conversation has its row back unchanged."""
        self._leave(Stage.ACQUIRED)
        self._row_changes()
        self.record, self._inherited, self._evicted_before = None, False, 0
        self.stage = Stage.ARRIVED

    def admit(self, prompt_len: int, start: str | None) -> None:
        """ARRIVED or ACQUIRED -> ADMITTED: it owns a row.

            0          protected        physical
            |-- tree ----|-- request ------>         locked by the request

        From ACQUIRED, the conversation gives up the row and has none until this request parks it.

        Args:
            prompt_len: length of the prompt, for a new row.
            start: how its conversation starts with it; None without one. After a retraction the first start stays.
        """
        resumes = self.stage is Stage.ACQUIRED
        self._leave(Stage.ARRIVED, Stage.ACQUIRED)
        if self.start is None:
            if resumes != (start == RESUMED):
                raise LifecycleError(f"a request that {self.stage.value} cannot start as {start}")
            self.start = start
        if not resumes:
            self._begin(RowRecord(prompt_len), inherited=False)
        self.stage = Stage.ADMITTED

    def round(self, plan: Plan, first_evicted: FirstEvicted, unordered_len: int, tail: int = 0) -> None:
        """ADMITTED -> ADMITTED: a compaction round.

            0            frozen       new physical       old physical
            |-- as before --|---- kept ----|--- allocator ---|

        The freed slots belong to the allocator. From now on the tree must never take the whole row.

        Args:
            first_evicted: reads the first position of the row that no longer holds its original token.
            unordered_len: entries at the front of the row that are now out of order.
            tail: newest entries whose tokens follow one another, as far as that is known.
        """
        self._leave(Stage.ADMITTED)
        if self.settings is None:
            raise LifecycleError("a request that is not compressed cannot have a round")
        self._row_changes()
        self.held_record.add_round(plan, first_evicted, unordered_len, tail)
        self.rounds += 1
        self.freed_slots += plan.freed_slots

    def fail(self, evicted_tokens: int) -> None:
        """ADMITTED -> ADMITTED: a round failed halfway; nothing of the row enters the tree, and the request must end.

        Args:
            evicted_tokens: those that the round has evicted.
        """
        self._leave(Stage.ADMITTED)
        self._row_changes()
        record, self.withheld = self.held_record, True
        record.evicted_tokens += evicted_tokens
        record.first_evicted_pos, record.unread = 0, ()

    def park(self, report: Report) -> RowRecord:
        """ADMITTED -> PARKED: its conversation takes over the row, cut to the computed entries, and the lock.

            0          protected        physical
            |-- tree ----|-- conversation --|        locked by the conversation

        Nothing enters the tree. Returns the row's record, for the next turn.
        """
        record = self._end(report, Stage.PARKED)
        self.kept = True
        return record

    def publish(self, report: Report) -> int | None:
        """ADMITTED -> PUBLISHED: the row goes back to SGLang, which frees what the tree does not take.

            0          exact           physical
            |-- tree ----|-- allocator --|

        Returns how many entries of a row with evictions the tree may take. None means that nothing was evicted, and
        that SGLang gives the tree the whole row if `tree_may_take_all` permits it.
        """
        self._published = self._end(report, Stage.PUBLISHED).exact_prefix_len()
        return self._published

    def retract(self, report: Report) -> None:
        """ADMITTED -> ARRIVED: it lost its row; all but the tree's part went to the allocator.

            0          protected        physical
            |-- tree ----|-- allocator --|

        The next row starts exact, and a frozen prompt may enter the tree again.
        """
        self._end(report, Stage.ARRIVED)
        self.rounds = self.freed_slots = 0

    def suspend(self, report: Report) -> None:
        """ADMITTED -> SUSPENDED: the host has copied its row, which went to the allocator.

        The record stays: the next row gets the copy, holes included.
        """
        self._leave(Stage.ADMITTED)
        self.report, self.stage = report, Stage.SUSPENDED

    def resume(self) -> None:
        """SUSPENDED -> ADMITTED: it owns a row into which the host copies the entries of the one before."""
        self._leave(Stage.SUSPENDED)
        CompressedRequest.rows += 1
        self.due_protected = -1
        self.stage = Stage.ADMITTED

    # When to look for a round

    def wait_until(self, due_len: int, protected: int) -> None:
        """Notes that no round is due before the row has `due_len` entries, while the tree owns `protected` of them."""
        self.due_len, self.due_protected = due_len, protected

    # How much memory it can need

    def know_bound(self, bound: int, protected: int, limit: int) -> None:
        """Notes the most entries of its row, while the tree owns `protected` and the answer may have `limit` tokens."""
        self.bound, self.bound_protected, self.bound_limit = bound, protected, limit

    def _row_changes(self) -> None:
        """Forgets what followed from its row."""
        CompressedRequest.changes += 1
        self.bound_protected = -1

    def _begin(self, record: RowRecord, *, inherited: bool) -> None:
        self._row_changes()
        self.record, self._inherited, self._evicted_before = record, inherited, record.evicted_tokens
        self.rounds = self.freed_slots = 0
        CompressedRequest.rows += 1
        # Its settings may differ from those of the turn before.
        self.due_protected = -1

    def _end(self, report: Report, stage: Stage) -> RowRecord:
        self._leave(Stage.ADMITTED)
        self._row_changes()
        record, self.record, self._inherited, self._evicted_before = self.held_record, None, False, 0
        self.report, self.stage = report, stage
        self.due_protected = -1
        return record

    def _leave(self, *stages: Stage) -> None:
        if self.stage not in stages:
            wanted = " or ".join(stage.name for stage in stages)
            raise LifecycleError(f"a request that {self.stage.value} was taken for one that is {wanted}")
