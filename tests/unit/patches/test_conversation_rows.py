"""Rows of idle conversations make way for waiting requests: as many as a step can admit."""

from array import array
from types import SimpleNamespace

import pytest

from sglang_triattn.config import Config
from sglang_triattn.patches.request.compressed import attach_options
from sglang_triattn.patches.scheduler.conversations import ROWS_PER_STEP, Conversations
from sglang_triattn.request.options import CompressionOptions
from sglang_triattn.request.row_index import row_hash
from sglang_triattn.request.row_record import RowRecord
from sglang_triattn.rounds.rules import complete


class Rows:
    """SGLang's table of rows, of which `free` are."""

    def __init__(self, free: int) -> None:
        self.free = free

    def available_size(self) -> int:
        return self.free


class Idle:
    """An idle conversation that has one row."""

    spare, previous, found_under = False, None, None

    def __init__(self, name) -> None:
        self.name = name

    def free_slots(self, scheduler) -> None:
        pass

    def free_row(self, scheduler) -> None:
        scheduler.req_to_token_pool.free += 1


def parked(count: int, free: int) -> Conversations:
    found = Conversations(ttl=600)
    found._scheduler = SimpleNamespace(req_to_token_pool=Rows(free))
    for number in range(count):
        found._idle.add(Idle(f"talk {number}"))
    return found


def waiting(count: int, conversation: str | None = None, beams: int | None = None) -> list[SimpleNamespace]:
    requests = [SimpleNamespace(beam_group=None, skip_radix_cache_insert=False) for _ in range(count)]
    for request in requests:
        attach_options(request, CompressionOptions(complete(Config()), conversation))
        request.beam_group = None if beams is None else SimpleNamespace(beam_width=beams)
    return requests


@pytest.mark.parametrize(
    ("count", "free", "dropped"),
    [(0, 0, 0), (700, 500, 0), (700, ROWS_PER_STEP, 0), (700, 100, 28), (700, 0, 100), (30, 0, 30), (30, 25, 5)],
)
def test_a_queue_drops_no_more_rows_than_a_step_can_admit(count, free, dropped):
    """Prevents a long queue from taking every conversation for rows that would then stand empty."""
    conversations = parked(100, free)
    assert conversations.make_rows(waiting(count)) == (dropped > 0)
    assert conversations.parked == 100 - dropped
    # The least recently used went first.
    assert next(iter(conversations.idle()), None) == (f"talk {dropped}" if dropped < 100 else None)


def test_conversations_that_are_waited_for_stay():
    """Prevents a request from losing the row that it is about to resume, however late in the queue it is."""
    conversations = parked(3, 0)
    queue = [*waiting(1, "talk 1"), *waiting(2 * ROWS_PER_STEP), *waiting(1, "talk 0")]
    assert conversations.make_rows(queue)
    assert list(conversations.idle()) == ["talk 0", "talk 1"]
    # Nothing more can be dropped.
    assert not conversations.make_rows(queue)


def test_rows_that_are_found_by_tokens_stay():
    """Prevents a prompt that nothing names from losing the row that it is about to go on after."""
    conversations = parked(0, 0)
    for number in range(3):
        idle = Idle(number)
        idle.ids, idle.least, idle.owner = array("q", [number] * 100), 90, (None, None, None)
        idle.record, idle.found_under = RowRecord(10, evicted_tokens=40), row_hash(idle.ids, 90, idle.owner)
        conversations._idle.add(idle)
    rules = complete(Config(conversations="auto"))
    queue = []
    for number in (1, 5):
        request = SimpleNamespace(beam_group=None, skip_radix_cache_insert=False, session=None, input_embeds=None)
        request.lora_id = request.extra_key = request.cache_salt = None
        request.origin_input_ids, request.output_ids = array("q", [number] * 95), array("q")
        request.return_logprob = False
        attach_options(request, CompressionOptions(rules, auto=True))
        queue.append(request)
    found, length = conversations.find(queue[0])
    assert (found.name, length) == (1, 94)
    assert conversations.find(queue[1]) is None
    assert conversations.make_rows(queue)
    assert list(conversations.idle()) == [1, 2]


def test_each_beam_takes_a_row():
    """Prevents a beam search that waits for rows which idle conversations hold."""
    conversations = parked(10, 1)
    assert conversations.make_rows(waiting(2, beams=3))
    assert conversations.parked == 5
