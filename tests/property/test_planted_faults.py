"""Faults planted into the package, each of which the simulation's own checks must notice.

Each is a small slip that a reader may miss. They replace names that the package's modules look up at run time, and
never anything in the checks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from checks import check_books, check_rounds, check_row
from histories import Conversing, run_histories
from memory_saver import release_memory
from sglang_triattn.census import IntegrityError
from sglang_triattn.kernels import device_round
from sglang_triattn.patches.request import compressed as requests
from sglang_triattn.patches.request.batch_lengths import lengths_without
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.patches.rounds import compressor, launches
from sglang_triattn.patches.rounds.compressor import Compressor
from sglang_triattn.patches.rounds.due import DueLooks
from sglang_triattn.patches.rounds.launches import Launch, MovedInputs
from sglang_triattn.patches.scheduler import conversations, idle_rows
from sglang_triattn.patches.scheduler import release as rows
from sglang_triattn.patches.scheduler.conversations import Conversations
from sglang_triattn.patches.scheduler.release import Rows
from sglang_triattn.request.lifecycle import CompressedRequest, RowRecord, Stage
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.inputs import TurnInputs
from simulation import Simulation


@dataclass(frozen=True)
class Fault:
    """One slip.

    Attributes:
        noticed: what the first check to notice it says.
        options: for random histories that show it, or a history of what is too rare there.
        start: seed of the random histories.
    """

    name: str
    plant: Callable[[pytest.MonkeyPatch], None]
    noticed: str
    options: dict | Callable[[], None]
    start: int = 1

    def history(self) -> None:
        if callable(self.options):
            self.options()
        else:
            run_histories(60, start=self.start, **self.options)


def free_pages(more: int):
    def plant(patch):
        real = launches.ceil_align
        patch.setattr(launches, "ceil_align", lambda length, page_size: real(length, page_size) - more * page_size)

    return plant


def free_what_stays(patch):
    def remap(slots, kept):
        ordered = real(slots, kept)
        keep = kept.shape[1]
        return torch.cat([ordered[:, -keep:], ordered[:, :-keep]], 1)

    real = device_round.remap
    patch.setattr(device_round, "remap", remap)


def forget_the_order(patch):
    patch.setattr(launches, "needs_order", lambda recent, interval: False)


def cut_into_the_newest(patch):
    real = launches.cut_column
    patch.setattr(launches, "cut_column", lambda keep, *rest: min(real(keep, *rest) + 1, keep))


def swap_newest_tokens(patch):
    real = Launch.close_up

    def close_up(self, rows, slots):
        real(self, rows, slots)
        for row, plan in self.rounds:
            listed = rows[row.kv.req_pool_idx]
            listed[plan.new_length - 2 : plan.new_length] = listed[plan.new_length - 2 : plan.new_length].flip(0)

    patch.setattr(Launch, "close_up", close_up)


def leave_the_newest_in_place(patch):
    patch.setattr(Launch, "close_up", lambda self, rows, slots: None)


def see_the_first_hole_late(patch):
    real = device_round.unchanged_start
    patch.setattr(device_round, "unchanged_start", lambda kept: real(kept) + 1)


def forget_earlier_rounds(patch):
    real = RowRecord.add_round

    def add_round(record, plan, first_evicted, *lengths):
        real(record, plan, first_evicted, *lengths)
        record.first_evicted_pos, record.unread = None, (first_evicted,)

    patch.setattr(RowRecord, "add_round", add_round)


def let_the_tree_take_all(patch):
    real = Compressor._record

    def record(self, row, *rest):
        real(self, row, *rest)
        row.request.skip_radix_cache_insert = False

    patch.setattr(Compressor, "_record", record)
    # The package's own guard would notice first.
    patch.setattr(
        Rows, "release", lambda self, original, req, tree, *, checkpoint: original(req, tree, checkpoint=True)
    )


def publish_what_sglang_frees(patch):
    real = rows.publish_start

    def publish_start(req, exact, tree):
        req.owned_kv_len = lambda: req.kv.kv_committed_len
        real(req, exact, tree)
        del req.owned_kv_len

    patch.setattr(rows, "publish_start", publish_start)


def free_what_the_tree_has(patch):
    def give_back(original, req, tree, *, checkpoint):
        original(req, tree, checkpoint=checkpoint)

    patch.setattr(rows, "give_back", give_back)


def publish_what_sglang_bars(patch):
    patch.setattr(rows, "ids_determine_kv", lambda request: True)


def keep_what_sglang_bars(patch):
    patch.setattr(conversations, "ids_determine_kv", lambda request: True)


def leave_the_tree_locked(patch):
    real = Conversations._drop

    def drop(self, idle):
        if idle is not None and self._idle.holds(idle):
            idle.lock = None
        return real(self, idle)

    patch.setattr(Conversations, "_drop", drop)


def free_a_row_twice(patch):
    real = Conversations._drop

    def drop(self, idle):
        row = idle.kv.req_pool_idx if idle is not None and self._idle.holds(idle) else None
        dropped = real(self, idle)
        if row is not None:
            self._scheduler.req_to_token_pool.free_rows([row])
        return dropped

    patch.setattr(Conversations, "_drop", drop)


def compact_what_is_frozen(patch):
    patch.setattr(requests, "frozen_length", lambda config, protected, prompt, page: config.sinks // page * page)


def keep_the_old_lengths(patch):
    patch.setattr(compressor, "shortened", lambda batch, _: lengths_without(batch, ()))


def keep_the_record_of_a_lost_row(patch):
    real = CompressedRequest._begin

    def begin(owner, record, *, inherited):
        real(owner, getattr(owner, "lost", record), inherited=inherited)

    def retract(owner, report):
        owner.lost = owner._end(report, Stage.ARRIVED)

    patch.setattr(CompressedRequest, "_begin", begin)
    patch.setattr(CompressedRequest, "retract", retract)


def resume_as_if_nothing_was_evicted(patch):
    real = conversations.take_row

    def take_row(request, kv, last_node):
        requests.compression_of(request).record = RowRecord(len(request.origin_input_ids))
        real(request, kv, last_node)

    patch.setattr(conversations, "take_row", take_row)


def read_rows_after_the_flush(patch):
    def on_flush(self, flushed, *_, **__):
        while flushed and self.drop_one():
            pass

    patch.setattr(Conversations, "_on_flush", on_flush)


def drop_rows_without_a_flush(patch):
    real = Conversations._on_flush
    patch.setattr(Conversations, "_on_flush", lambda self, flushed, *rest, **more: real(self, True, *rest, **more))


def forget_who_lost_a_row(patch):
    patch.setattr(idle_rows.LostNames, "add", lambda self, name: None)


def an_answer_that_became_a_prompt(*, finish: bool = False) -> None:
    """A request is retracted and then finds its own output in the tree."""
    sim = Simulation(1, strip_thinking=True)
    first = sim.request([5] * 8, thinks=True)
    assert sim.admit(first, 1000)
    for _ in range(6):
        assert sim.decode(first)
    assert sim.admit(sim.request([*first.tokens, 9]), 1000)
    sim.retract(first)
    assert sim.admit(sim.waiting.pop(), 1000)
    assert first.req.kv.cache_protected_len > 8
    check_books(sim)
    sim.release(first, finish=finish)
    check_books(sim)


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "retracted"])
def test_an_answer_that_became_a_prompt_stays_the_trees(finish):
    """Prevents --strip-thinking-cache from freeing slots that the tree owns, or from ending the server."""
    an_answer_that_became_a_prompt(finish=finish)


def a_row_anew() -> None:
    """A request is retracted, and has a longer row by the next step, so that the same requests run."""
    for steps in range(30, 36):
        sim = Simulation(1, selection="shared-mean")
        request = sim.request([7] * 10)
        assert sim.admit(request, 1000)
        for _ in range(steps):
            check_rounds(sim)
            assert sim.decode(request)
        check_rounds(sim)
        assert sim.rounds > 1
        sim.retract(request)
        assert sim.admit(sim.waiting.pop(), 1000)
        check_rounds(sim)


def test_a_row_anew():
    """Prevents a late round of a request that has another row in the step after it was retracted."""
    a_row_anew()


def a_flush_of_a_row() -> None:
    """The memory of an idle row is unmapped."""
    sim = Simulation(1, selection="shared-mean")
    turn = sim.request([7] * 10, "a")
    assert sim.admit(turn, 1000)
    for _ in range(30):
        check_rounds(sim)
        assert sim.decode(turn)
    sim.release(turn, finish=True)
    assert sim.conversations.parked
    assert release_memory(sim, granted=True)
    check_books(sim)


def test_a_flush_of_a_row():
    """Prevents the row of a conversation from being read or freed once its memory is gone."""
    a_flush_of_a_row()


def turns_with_edited_ends() -> None:
    """Turns that go on before the end of a row: among what the last turn brought, before that, and among gaps."""
    for page_size, less in [(1, 9), (1, 24), (1, 2), (4, 9), (4, 24)]:
        sim = Simulation(page_size, pool=320, conversations="auto", selection="per-layer-head")
        text = [7] * 10
        for number, steps in enumerate((30, 5, 20, 20)):
            text = [*text[: len(text) - less * (number > 1)], *([number + 1] * 15 if number else [])]
            # What the third brings is compacted, and does not take the place of the inputs that were cut off.
            settings = replace(sim.config, turn_inputs="compact" if number == 2 else "keep")
            turn = sim.request(text, asked=CompressionOptions(settings, auto=True))
            assert sim.admit(turn, 1000)
            for _ in range(steps):
                check_rounds(sim)
                assert sim.decode(turn)
                check_books(sim)
                check_row(sim, turn)
            text = turn.tokens
            sim.release(turn, finish=True)
            check_books(sim)


def test_turns_with_edited_ends():
    """Prevents a row from being cut among gaps, with its end kept, or with inputs that are no longer there."""
    turns_with_edited_ends()


def reserve_what_was_needed_once(patch):
    patch.setattr(CompressedRequest, "_row_changes", lambda owner: None)


def take_inputs_for_generated(patch):
    patch.setattr(conversations, "record_for_turn", lambda idle, *_: idle.record)


def forget_moved_inputs(patch):
    real = TurnInputs.after_round
    patch.setattr(TurnInputs, "after_round", lambda self, *numbers: replace(real(self, *numbers), end=0))


def forget_that_inputs_moved(patch):
    real = RowRecord.add_round

    def add_round(record, plan, first_evicted, *lengths):
        inputs = plan.inputs_after(record.inputs)
        real(record, replace(plan, moved=()), first_evicted, *lengths)
        record.inputs = inputs

    patch.setattr(RowRecord, "add_round", add_round)


def leave_inputs_in_place(patch):
    patch.setattr(MovedInputs, "write", lambda self, rows, slots: None)


def cut_among_gaps(patch):
    patch.setattr(conversations, "least_resumed", lambda request, *_: requests.evicted_of(request) + 1)


def keep_the_end_of_a_cut_row(patch):
    patch.setattr(idle_rows, "free_tail", lambda *_: None)


def keep_inputs_after_a_cut(patch):
    patch.setattr(TurnInputs, "cut", lambda self, end, page_size: self)


def go_on_after_any_text(patch):
    patch.setattr(idle_rows, "common_length", lambda one, other: min(len(one), len(other)))


def overlook_a_request_that_joins(patch):
    real = DueLooks.of_step

    def of_step(looks, requests):
        known = dict.fromkeys(looks._requests)
        return [index for index in real(looks, requests) if requests[index] in known]

    patch.setattr(DueLooks, "of_step", of_step)


def overlook_another_row(patch):
    real = CompressedRequest._begin

    def begin(owner, record, *, inherited):
        real(owner, record, inherited=inherited)
        CompressedRequest.rows -= 1

    patch.setattr(CompressedRequest, "_begin", begin)


def look_a_step_late(patch):
    real = DueLooks.again
    patch.setattr(DueLooks, "again", lambda looks, request, left: real(looks, request, left + 2 * looks._tokens))


def wait_past_the_bound(patch):
    real = CompressedRow.wait_until_due

    def wait_until_due(row):
        real(row)
        row.compression.due_len += 1

    patch.setattr(CompressedRow, "wait_until_due", wait_until_due)


REMAP = {"page_size": 1, "selection": "shared-mean"}
CUT = {"page_size": 1, "selection": "per-head", "recent": 10}
PAGES = {"page_size": 4}
# Rounds leave this many first tokens alone, more than most prompts have.
STRIP = {"page_size": 1, "strip_thinking": True, "sinks": 12}
BARRED = {"page_size": 1, "radix": True, "varied": True}
TALKS = {"page_size": 1, "selection": "per-layer-head", "histories": Conversing, "pool": 320}
FAULTS = [
    Fault("a round frees a page too few", free_pages(-1), "slots came back, not|free, tree and private", PAGES),
    Fault("a round frees a page too many", free_pages(1), "slots came back, not|belongs to", PAGES),
    Fault("a round frees what it keeps", free_what_stays, "recent token was|came from|not in order", REMAP),
    Fault("order is lost where it counts", forget_the_order, "not in order", {**PAGES, "recent": 10}),
    Fault("a row is cut after a newest token", cut_into_the_newest, "not in order|recent token|came from", CUT),
    Fault("newest tokens change places in the row", swap_newest_tokens, "not in order", CUT),
    Fault("a cut row is not closed up", leave_the_newest_in_place, "belongs to|recent token|came from|held twice", CUT),
    Fault("the first hole is off by one", see_the_first_hole_late, "but may have", REMAP),
    Fault(
        "only the last round's hole counts", forget_earlier_rounds, "but may have", {**REMAP, "prompt": "compact"}, 7
    ),
    Fault("the tree takes compacted rows", let_the_tree_take_all, "but may have", REMAP),
    Fault("more is published than SGLang owns", publish_what_sglang_frees, "but may have|free, tree and", STRIP),
    Fault(
        "the tree's copy of an answer is freed",
        free_what_the_tree_has,
        "free, tree and|belongs to",
        an_answer_that_became_a_prompt,
    ),
    Fault("barred rows are published", publish_what_sglang_bars, "but may have", BARRED, 8),
    Fault("barred rows are kept", keep_what_sglang_bars, "do not determine", {"varied": True}),
    Fault("a dropped conversation leaves its lock", leave_the_tree_locked, "of the tree are locked", REMAP),
    Fault("a conversation's row is freed twice", free_a_row_twice, "a row has no owner", REMAP),
    Fault("rounds reach into the frozen part", compact_what_is_frozen, "wrote to a slot|due round|frozen|kept", PAGES),
    Fault("the batch keeps its old lengths", keep_the_old_lengths, "the batch has other lengths", REMAP),
    Fault("a retracted request keeps its record", keep_the_record_of_a_lost_row, "other (content|tokens)", REMAP, 11),
    Fault(
        "a resumed row forgets what it lost",
        resume_as_if_nothing_was_evicted,
        "due round|other tokens|count as inputs|do not follow",
        REMAP,
    ),
    Fault("inputs count as generated", take_inputs_for_generated, "count as inputs|lost . input|lost .. input", TALKS),
    Fault("moved inputs are forgotten", forget_moved_inputs, "count as inputs|frozen|due round|another number", TALKS),
    Fault("a permuted row passes for exact", forget_that_inputs_moved, "but may have", TALKS),
    Fault("inputs are not moved", leave_inputs_in_place, "belongs to|held twice|came from|frozen|input tokens", TALKS),
    Fault("a row is cut among gaps", cut_among_gaps, "do not follow|other text", turns_with_edited_ends),
    Fault("the end of a cut row is kept", keep_the_end_of_a_cut_row, "free, tree and", turns_with_edited_ends),
    Fault(
        "inputs after a cut stay inputs", keep_inputs_after_a_cut, "count as inputs|due round", turns_with_edited_ends
    ),
    Fault("a row is found by other text", go_on_after_any_text, "after other text", turns_with_edited_ends),
    Fault("a flush reads rows", read_rows_after_the_flush, "unmapped memory was accessed|freed only", a_flush_of_a_row),
    Fault("a refused flush takes rows", drop_rows_without_a_flush, "a refused flush took", REMAP, 3),
    Fault(
        "a bound outlives what it follows from",
        reserve_what_was_needed_once,
        "are reserved instead of|admission must open",
        BARRED,
    ),
    Fault("a request that joins is never looked at", overlook_a_request_that_joins, "due round did not", REMAP),
    Fault("a request with another row is not looked at", overlook_another_row, "due round did not", a_row_anew),
    Fault("a request is looked at too late", look_a_step_late, "due round did not", REMAP),
    Fault("a row waits for more than its bound", wait_past_the_bound, "due round did not", REMAP),
    Fault("a lost conversation passes for new", forget_who_lost_a_row, "the conversation is new", REMAP),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_planted_fault_is_noticed(fault, monkeypatch):
    """Prevents checks that cannot fail: these histories pass without the fault and must not pass with it.

    The faults: a page too few or too many freed; kept slots freed; order lost; rows cut in the wrong place, closed up
    in another order or not at all; the first hole noticed late or forgotten; the tree given compacted rows, rows that
    SGLang frees or rows that it bars, or losing slots that it owns; conversations that keep barred rows, leave a lock,
    free a row twice, forget what was evicted, are read after a flush, are taken by a refused one, or are forgotten;
    inputs of resumed turns that are scored, forgotten, left in their places, or moved and then passed for exact;
    rounds on the frozen part; requests that are looked at late or never; lengths, states and bounds that outlive what
    they follow from.
    """
    fault.plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError), match=fault.noticed):
        fault.history()
