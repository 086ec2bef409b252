"""Which requests of a server have their first round early."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_triattn.config import Config
from sglang_triattn.patches.rounds import leveller
from sglang_triattn.patches.rounds.leveller import Leveller
from sglang_triattn.rounds.rules import complete

BUDGET, INTERVAL = 64, 32
RULES = complete(Config(budget=BUDGET, interval=INTERVAL, recent=8, rounds_per_step=2))


@pytest.fixture(autouse=True)
def compression_on_the_request(monkeypatch):
    monkeypatch.setattr(leveller, "compression_of", lambda request: request.compression)


def request(private: int, *, left_to_generate: int = 1000, rounds: int = 0, compressed: bool = True) -> SimpleNamespace:
    """A request whose prompt is frozen away, so that its row is private."""
    return SimpleNamespace(
        kv=SimpleNamespace(kv_committed_len=private),
        sampling_params=SimpleNamespace(max_new_tokens=left_to_generate + 5),
        output_ids=[0] * 5,
        compression=SimpleNamespace(
            settings=RULES if compressed else None, due_len=BUDGET + INTERVAL, due_protected=0, rounds=rounds
        ),
    )


def test_a_round_that_is_due_takes_the_nearest_along():
    """Prevents a lot that stays empty, and one that takes a request which is not compressed or has its phase."""
    running = [
        request(BUDGET + INTERVAL),
        request(BUDGET + 30, compressed=False),
        request(BUDGET + 29, rounds=1),
        request(BUDGET + 20),
        request(BUDGET + 28),
    ]
    assert Leveller(RULES).early(running, num_due=1) == [4]


@pytest.mark.parametrize(("left", "expected"), [(4, []), (5, [1]), (1000, [1])])
def test_a_request_that_ends_before_its_round_is_due_has_none(left, expected):
    """Prevents tokens lost from a request that never reaches budget + interval."""
    running = [request(BUDGET + INTERVAL), request(BUDGET + 28, left_to_generate=left), request(1)]
    assert Leveller(RULES).early(running, num_due=1) == expected


def test_no_more_requests_than_a_lot_are_left_alone():
    """Prevents a first round that comes early where all may have theirs in one step."""
    running = [request(BUDGET + INTERVAL), request(BUDGET + 28)]
    assert Leveller(RULES).early(running, num_due=1) == []
