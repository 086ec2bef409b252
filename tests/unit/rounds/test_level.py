"""Level rounds: few in one step, none late."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_triattn.rounds.level import LOT, choose_early, earliest, lot_for, steps_until_overdue

BUDGET, INTERVAL = 64, 32
FIRST = BUDGET + earliest(INTERVAL)


class Server:
    """Requests that grow by a token a step, and have rounds as `choose_early` says."""

    def __init__(self, asked: int | None = None) -> None:
        self.private: list[int] = []
        self.had_round: list[bool] = []
        self.rounds: list[int] = []
        self.early: list[int] = []
        self.asked, self.running, self.sleep = asked, 0, 0

    def arrive(self, count: int, private: int = 0) -> None:
        self.private += [private] * count
        self.had_round += [False] * count

    def leave(self, index: int) -> None:
        del self.private[index], self.had_round[index]

    def step(self) -> None:
        steps = [BUDGET + INTERVAL - length for length in self.private]
        movable = [length >= FIRST and not had for length, had in zip(self.private, self.had_round, strict=True)]
        lot = lot_for(len(self.private), INTERVAL, self.asked)
        due = [index for index, left in enumerate(steps) if left <= 0]
        early = choose_early(steps, movable, lot)
        self.sleep -= 1
        if due or len(steps) != self.running or self.sleep <= 0:
            self.running, self.sleep = (
                len(steps),
                steps_until_overdue([left if left > 0 else INTERVAL for left in steps], lot),
            )
        else:
            assert not early, "a step without a look would have needed an early round"
        chosen = [*due, *early]
        for index in chosen:
            self.early.append(BUDGET + INTERVAL - self.private[index])
            self.private[index], self.had_round[index] = BUDGET, True
        self.rounds.append(len(chosen))
        # The bound of a request holds in each step.
        assert all(length < BUDGET + INTERVAL for length in self.private)
        self.private = [length + 1 for length in self.private]


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100, 192, 256, 1024])
def test_a_burst_is_level_for_life(count):
    """Prevents all requests of a batch from having their rounds in one step."""
    server = Server()
    server.arrive(count)
    for _ in range(BUDGET + 6 * INTERVAL):
        server.step()
    assert max(server.rounds) <= lot_for(count, INTERVAL)
    assert sum(server.rounds[-INTERVAL:]) == count
    # Every later round is a regular one.
    assert Counter(server.early[count:]).keys() <= {0}


@pytest.mark.parametrize("count", [16, 40, 64, 128])
def test_requests_that_arrive_one_by_one_gather(count):
    """Prevents two rounds in every step, each at the price of several launches."""
    server = Server()
    for number in range(count):
        server.arrive(1, private=(number * 7) % INTERVAL)
    for _ in range(BUDGET + 6 * INTERVAL):
        server.step()
    last = [rounds for rounds in server.rounds[-INTERVAL:] if rounds]
    assert sum(last) == count
    assert max(last) <= lot_for(count, INTERVAL)
    assert len(last) <= -(-count // LOT) + 1


@pytest.mark.parametrize("asked", [1, 2, 32])
def test_the_number_of_the_user_counts(asked):
    """Prevents a setting without effect."""
    server = Server(asked)
    server.arrive(16)
    for _ in range(BUDGET + 4 * INTERVAL):
        server.step()
    assert max(server.rounds) == min(asked, 16)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 24), st.integers(0, 3), st.integers(1, 9)), min_size=5, max_size=40))
def test_no_round_is_late(history):
    """Prevents a request above its bound, and early rounds that free next to nothing."""
    server = Server()
    for arriving, leaving, steps in history:
        server.arrive(arriving)
        for _ in range(min(leaving, len(server.private))):
            server.leave(0)
        for _ in range(steps):
            server.step()
    assert all(0 <= early <= INTERVAL - INTERVAL // 4 for early in server.early)


@pytest.mark.parametrize("count", [1, 5, LOT])
def test_few_requests_have_their_rounds_when_they_are_due(count):
    """Prevents answers that depend on other requests where all rounds may meet in a step anyway."""
    server = Server()
    for number in range(count):
        server.arrive(1, private=number)
    for _ in range(BUDGET + 4 * INTERVAL):
        server.step()
    assert set(server.early) == {0}


def test_those_admitted_first_come_first():
    """Prevents ranks from choosing differently among equals."""
    assert choose_early([5] * 20, [True] * 20, 4) == []
    assert choose_early([4] * 20, [True] * 20, 4) == [0, 1, 2, 3]
    assert choose_early([3] * 20, [True] * 20, 4) == [0, 1, 2, 3]
    assert choose_early([0, 5, 1, 5, 9], [False, True, True, True, False], 3) == [2, 1]
    assert choose_early([0] * 9, [False] * 9, 4) == []
