"""Which requests of a batch carry a report, and how seldom a batch is looked through for them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from request_cases import REPORT
from sglang_triattn.patches.observability.reporting import KEY, reporting_streamer
from sglang_triattn.patches.request.compressed import compression_of
from sglang_triattn.patches.scheduler.release import Rows

WITHOUT_ROWS = SimpleNamespace(finish_copies=lambda: None)
"""In the place of Conversations."""


class Request(SimpleNamespace):
    """A request of which it is counted how often it is asked whether it has finished."""

    looks = 0

    def __init__(self) -> None:
        super().__init__(beam_group=None, skip_radix_cache_insert=False, kv=SimpleNamespace(holds_kv=False))
        self.reason = None

    @property
    def finished_reason(self) -> str | None:
        Request.looks += 1
        return self.reason

    def end(self, *, released: bool = True) -> None:
        """As SGLang ends a request, before it sends the batch's output."""
        self.reason, compression_of(self).report = "length", REPORT
        if released:
            Rows(WITHOUT_ROWS).release(lambda *_, **__: None, self, None, checkpoint=True)


@pytest.fixture
def streamer():
    class Streamer:
        def build_additional_customized_info(self, reqs: list) -> dict[str, list]:
            return {}

    return reporting_streamer(Streamer, lambda: None)()


def reports(streamer, requests: list[Request]) -> list[dict | None]:
    return streamer.build_additional_customized_info(requests)[KEY]


def test_each_request_is_reported_when_it_ends(streamer):
    """Prevents an answer without its report, while others of its batch go on or end in other steps."""
    batch = [Request() for _ in range(5)]
    assert reports(streamer, batch) == [None] * 5
    for ended in ([3], [0, 2], [1]):
        for index in ended:
            batch[index].end()
        found = reports(streamer, batch)
        assert found == [REPORT.to_dict() if request.reason else None for request in batch]
        batch = [request for request in batch if not request.reason] + [Request()]
        assert reports(streamer, batch) == [None] * len(batch)


def test_a_request_without_a_row_is_reported(streamer):
    """Prevents a request that ends before it has a row, and is sent by itself, from being answered without a report."""
    batch, alone = [Request() for _ in range(3)], Request()
    assert reports(streamer, batch) == [None] * 3
    alone.end(released=False)
    assert reports(streamer, [alone]) == [REPORT.to_dict()]


def test_a_release_is_seen_by_the_batch_that_it_belongs_to(streamer):
    """Prevents output without requests, or of one by itself, from using up the notice of a release."""
    batch = [Request() for _ in range(3)]
    assert reports(streamer, batch) == [None] * 3
    batch[1].end()
    assert reports(streamer, []) == []
    assert reports(streamer, [Request()]) == [None]
    assert reports(streamer, batch) == [None, REPORT.to_dict(), None]


def test_a_step_in_which_nothing_ends_looks_at_no_request(streamer):
    """Prevents work in every step for every running request."""
    batch = [Request() for _ in range(100)]
    reports(streamer, batch)
    before = Request.looks
    assert [reports(streamer, batch) for _ in range(10)] == [[None] * 100] * 10
    assert Request.looks == before
