"""A compressed request's life: what each transition changes, what may follow it, and what the tree may have."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from request_cases import COMPACT, CONFIG, LEGAL, PROMPT, REPORT, request
from sglang_triattn.patches.request.compressed import attach_options, compression_of, long_enough
from sglang_triattn.patches.request.row import CompressedRow
from sglang_triattn.request.lifecycle import RESUMED, CompressedRequest, LifecycleError, RowRecord, Stage
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.rounds.plan import Plan


def admitted(**options) -> CompressedRequest:
    owner = request(**options)
    owner.admit(PROMPT, None)
    return owner


def round_of(evicted: int = 30) -> Plan:
    return Plan(frozen=PROMPT, old_length=150, new_length=150 - evicted, next_position=150, freed_slots=evicted)


TRANSITIONS = {
    "compact_prompt": lambda owner: owner.compact_prompt(),
    "acquire": lambda owner: owner.acquire(RowRecord(PROMPT, evicted_tokens=30)),
    "rollback": lambda owner: owner.rollback(),
    "admit": lambda owner: owner.admit(PROMPT, RESUMED if owner.stage is Stage.ACQUIRED else None),
    "round": lambda owner: owner.round(round_of(), lambda: PROMPT, 0),
    "fail": lambda owner: owner.fail(0),
    "park": lambda owner: owner.park(REPORT),
    "publish": lambda owner: owner.publish(REPORT),
    "retract": lambda owner: owner.retract(REPORT),
    "suspend": lambda owner: owner.suspend(REPORT),
    "resume": lambda owner: owner.resume(),
}
WAYS = {
    Stage.ARRIVED: [],
    Stage.ACQUIRED: ["acquire"],
    Stage.ADMITTED: ["admit"],
    Stage.SUSPENDED: ["admit", "suspend"],
    Stage.PARKED: ["admit", "park"],
    Stage.PUBLISHED: ["admit", "publish"],
}


@pytest.mark.parametrize("name", TRANSITIONS)
@pytest.mark.parametrize("stage", Stage)
def test_every_transition_from_every_stage(stage, name):
    """Prevents a row from being released twice, parked after it was lost, or compacted without an owner."""
    owner = request()
    for step in WAYS[stage]:
        TRANSITIONS[step](owner)
    assert owner.stage is stage
    before = dict(vars(owner))
    if name in LEGAL[stage]:
        TRANSITIONS[name](owner)
        assert owner.stage is LEGAL[stage][name]
        assert (owner.record is None) == (owner.stage not in (Stage.ACQUIRED, Stage.ADMITTED, Stage.SUSPENDED))
        return
    with pytest.raises(LifecycleError, match=r"^a request that .* was taken for one that is "):
        TRANSITIONS[name](owner)
    assert vars(owner) == before


@pytest.mark.parametrize("config", [CONFIG, COMPACT], ids=["frozen", "compact"])
@pytest.mark.parametrize("withheld", [False, True])
def test_a_row_without_evictions_enters_the_tree_as_a_whole(config, withheld):
    """Prevents an exact row that cannot be shared, and the tree from freezing a prompt that is to be compacted."""
    owner = request(config, withheld=withheld)
    early = not withheld and config is CONFIG
    assert owner.tree_may_take_all == early
    owner.admit(PROMPT, None)
    assert owner.tree_may_take_all == early
    assert owner.publish(REPORT) is None
    assert owner.tree_may_take_all == (not withheld)


def test_a_row_with_evictions_enters_up_to_the_first():
    """Prevents K/V that attended to a row with holes from being served to others."""
    owner = admitted()
    owner.round(round_of(), lambda: 44, 0)
    owner.round(round_of(), lambda: 31, 0)
    assert not owner.tree_may_take_all
    assert owner.publish(REPORT) == 31
    assert not owner.tree_may_take_all


def test_a_retracted_request_starts_exact():
    """Prevents a row from being taken for a compacted one, or barred from the tree for good."""
    owner = admitted()
    owner.round(round_of(), lambda: 44, 7)
    owner.retract(REPORT)
    assert (owner.evicted_tokens, owner.rounds, owner.tree_may_take_all) == (0, 0, True)
    owner.admit(PROMPT, None)
    assert owner.record == RowRecord(PROMPT)


def test_a_suspended_request_keeps_its_record():
    """Prevents a row that comes back from the host from being taken for an exact one."""
    owner = admitted()
    owner.round(round_of(), lambda: 44, 7)
    owner.suspend(REPORT)
    assert (owner.evicted_tokens, owner.rounds, owner.tree_may_take_all) == (30, 1, False)
    owner.resume()
    assert (owner.stage, owner.evicted_tokens, owner.held_record.unordered_len) == (Stage.ADMITTED, 30, 7)
    assert owner.publish(REPORT) == 44


def test_a_resumed_row_goes_on_where_it_was():
    """Prevents a turn that forgets what the row lost, and a failed admission that changes the parked row."""
    first = admitted(conversation="c")
    first.round(round_of(), lambda: 44, 7)
    record = first.park(REPORT)
    assert first.kept
    turn = request(conversation="c")
    turn.acquire(record)
    turn.rollback()
    assert turn.evicted_tokens == 0
    turn.acquire(record)
    turn.admit(500, RESUMED)
    assert turn.record == record
    assert turn.record is not record
    assert turn.record.prompt_len == PROMPT
    assert (turn.rounds, turn.freed_slots) == (0, 0)
    turn.round(round_of(), lambda: 60, 9)
    assert turn.evicted_tokens == 60
    assert record.evicted_tokens == 30
    assert turn.publish(REPORT) == 44


def test_a_start_is_reported_once_and_must_be_true():
    """Prevents telling a client that its conversation resumed when it did not."""
    owner = request(conversation="c")
    with pytest.raises(LifecycleError, match="cannot start as resumed"):
        owner.admit(PROMPT, RESUMED)
    owner.acquire(RowRecord(PROMPT, 30))
    with pytest.raises(LifecycleError, match="cannot start as lost"):
        owner.admit(PROMPT, "lost")
    owner.admit(PROMPT, RESUMED)
    owner.retract(REPORT)
    owner.admit(PROMPT, RESUMED)
    assert owner.start == RESUMED
    assert owner.record == RowRecord(PROMPT)


def test_what_is_not_compressed_has_no_round():
    """Prevents eviction from a request that declined it."""
    with pytest.raises(LifecycleError, match="not compressed"):
        admitted(config=None).round(round_of(), lambda: 0, 0)


@pytest.mark.parametrize("first", [[], [9], [9, 7], [5, 7, 9, 8], [9, 8, 5, 7], [9, 8, 7, 0]])
def test_exact_prefix_ends_at_the_first_eviction_of_all_rounds(first):
    """Prevents K/V after an eviction from entering the tree, and ten thousand rounds from keeping all positions."""
    record, unread = RowRecord(PROMPT), []
    for number, position in enumerate(first):
        unread.append(number)
        record.add_round(round_of(1), lambda number=number, position=position: unread.remove(number) or position, 0)
        assert unread == list(range(number + 1))[-2:], "the copies of the last two rounds may not have been made yet"
    assert record.exact_prefix_len() == min(first, default=None)


def test_what_inputs_have_left_is_no_longer_whole():
    """Prevents a row from being cut, for another end of its text, among tokens between which moved inputs are missing:
    it would keep tokens that the other text does not have."""
    record, newest = RowRecord(PROMPT), 9
    # Four tokens came after the inputs that move.
    moving = Plan(frozen=14, old_length=38, new_length=33, next_position=38, freed_slots=5, moved=((30, 34),))
    record.add_round(moving, lambda: 14, 0, 4)
    assert record.scattered_len == 29
    # Two more have come, so that six of the newest nine follow one another.
    pressed = Plan(frozen=14, old_length=35, new_length=30, next_position=40, freed_slots=5)
    record.add_round(pressed, lambda: 14, 0, newest)
    assert record.scattered_len == 24
    # Once more than nine have come, all of the newest do.
    later = Plan(frozen=14, old_length=42, new_length=30, next_position=52, freed_slots=12)
    record.add_round(later, lambda: 14, 0, newest)
    assert record.scattered_len == 30 - newest


def served(length: int, protected: int = 8) -> SimpleNamespace:
    """An SGLang request with 10 prompt tokens that holds `length` entries."""
    kv = SimpleNamespace(kv_committed_len=length, cache_protected_len=protected)
    found = SimpleNamespace(beam_group=None, skip_radix_cache_insert=False, kv=kv, origin_input_ids=range(10))
    attach_options(found, CompressionOptions(CONFIG)).admit(10, None)
    return found


def row_of(found: SimpleNamespace) -> CompressedRow:
    return CompressedRow(found, compression_of(found), CONFIG, page_size=1)


@pytest.mark.parametrize(("unordered", "recent"), [(0, 10), (150, 10), (190, 10), (195, 5), (200, 0)])
def test_a_row_says_how_many_of_its_newest_tokens_are_known(unordered, recent):
    """Prevents old tokens from being kept as the newest in a row whose order an earlier round has lost."""
    found = served(200)
    compression_of(found).record.unordered_len = unordered
    assert row_of(found).recent(round_of()) == recent


def test_a_request_is_looked_at_again_when_its_row_has_grown_enough():
    """Prevents a round that comes one token late, and planning for every request in every step."""
    found = served(20)
    due = 10 + CONFIG.trigger(10)
    assert long_enough([found]) == [0]
    row_of(found).wait_until_due()
    for length in (21, due - 1):
        found.kv.kv_committed_len = length
        assert long_enough([found, served(5), found]) == [1]
    found.kv.kv_committed_len = due
    assert long_enough([found]) == [0]


def test_what_was_known_of_a_row_ends_with_it():
    """Prevents a late round after the tree took more of a row, after a retraction, or in a turn with less budget."""
    found = served(20)
    owner = compression_of(found)
    row_of(found).wait_until_due()
    found.kv.cache_protected_len = 16
    assert long_enough([found]) == [0]
    row_of(found).wait_until_due()
    assert long_enough([found]) == []
    owner.retract(REPORT)
    assert long_enough([found]) == [0]
    owner.acquire(RowRecord(10, evicted_tokens=5))
    owner.admit(10, RESUMED)
    assert long_enough([found]) == [0]


def test_a_beam_search_is_not_compressed():
    """Prevents rounds on rows that several beams share."""
    found = SimpleNamespace(beam_group=object(), skip_radix_cache_insert=True)
    assert attach_options(found, CompressionOptions(COMPACT)).settings is None
    assert found.skip_radix_cache_insert
