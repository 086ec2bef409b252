"""Random lives of a compressed request, checked against a list of what its row holds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from request_cases import COMPACT, CONFIG, LEGAL, PROMPT, REPORT, request
from sglang_triattn.request.lifecycle import RESUMED, RowRecord, Stage
from sglang_triattn.rounds.plan import plan_round


class Account:
    """A request with a list of what its row holds, driven at random: prefixes, evictions, and who owns the row."""

    def __init__(self, pick: Callable[[int], int]) -> None:
        """pick(n) returns a number below n."""
        self._pick = pick
        self.parked: list[tuple[RowRecord, list[int]]] = []
        self.seen: set[tuple[Stage, str]] = set()
        self._arrive()

    def _arrive(self) -> None:
        self.owner = request([CONFIG, COMPACT][self._pick(2)], withheld=not self._pick(5))
        self.row: list[int] | None = None
        self.acquired: tuple[RowRecord, list[int]] | None = None
        self.spoiled = False

    def step(self) -> None:
        owner, stage = self.owner, self.owner.stage
        if stage in (Stage.PARKED, Stage.PUBLISHED):
            self._arrive()
            return
        ways = [name for name in LEGAL[stage] if name != "acquire" or self.parked]
        name = ways[self._pick(len(ways))]
        self.seen.add((stage, name))
        getattr(self, f"_{name}")(owner)
        assert owner.evicted_tokens == (0 if self.row is None else self.computed - len(self.row))
        exact = self.row is not None and self.row == list(range(len(self.row)))
        assert not (owner.tree_may_take_all and self.row is not None and not exact), "the tree may take a compacted row"

    def _compact_prompt(self, owner) -> None:
        owner.compact_prompt()

    def _acquire(self, owner) -> None:
        if owner.start is not None:
            return
        self.acquired = self.parked.pop(self._pick(len(self.parked)))
        owner.acquire(self.acquired[0])
        self.row, self.computed, self.spoiled = list(self.acquired[1]), *self.acquired[2:]

    def _rollback(self, owner) -> None:
        owner.rollback()
        self.parked.append(self.acquired)
        self.row = None

    def _admit(self, owner) -> None:
        resumes = owner.stage is Stage.ACQUIRED
        owner.admit(PROMPT, owner.start or (RESUMED if resumes else None))
        if not resumes:
            self.row, self.computed, self.spoiled = list(range(PROMPT)), PROMPT, False

    def _round(self, owner) -> None:
        grown = 40 + self._pick(120)
        self.row += range(self.computed, self.computed + grown)
        self.computed += grown
        plan = plan_round(
            owner.settings,
            frozen=PROMPT,
            length=len(self.row),
            evicted_before=self.computed - len(self.row),
            page_size=1,
        )
        if plan is None:
            return
        private, step = self.row[PROMPT:], 1 + self._pick(len(self.row) - 1)
        # Every so many tokens, in turns until enough are evicted.
        evicted: set[int] = set()
        place = self._pick(len(private))
        while len(evicted) < plan.evicted_tokens:
            while place in evicted:
                place = (place + 1) % len(private)
            evicted.add(place)
            place = (place + step) % len(private)
        kept = [token for index, token in enumerate(private) if index not in evicted]
        old, self.row = self.row, self.row[:PROMPT] + kept
        first = next(i for i, (was, now) in enumerate(zip(old, [*self.row, None], strict=False)) if was != now)
        owner.round(plan, lambda: first, 0)

    def _park(self, owner) -> None:
        self.parked.append((owner.park(REPORT), self.row, self.computed, self.spoiled))
        self.row = None

    def _fail(self, owner) -> None:
        owner.fail(0)
        self.spoiled = True

    def _publish(self, owner) -> None:
        exact = owner.publish(REPORT)
        whole = self.row == list(range(len(self.row)))
        assert (exact is None) == (self.computed == len(self.row))
        assert exact is None or self.row[:exact] == list(range(exact)), "the tree gets an entry after an eviction"
        assert self.spoiled or exact is None or exact == len(self.row) or self.row[exact] != exact, (
            "the tree gets less than it may"
        )
        assert not (self.spoiled and exact), "the tree gets K/V of a failed round"
        assert owner.tree_may_take_all == (whole and exact is None and not owner.withheld)
        self.row = None

    def _retract(self, owner) -> None:
        owner.retract(REPORT)
        self.row = None

    def _suspend(self, owner) -> None:
        owner.suspend(REPORT)

    def _resume(self, owner) -> None:
        owner.resume()


def test_a_hundred_thousand_transitions():
    """Prevents an order of transitions after which the tree may take a row with holes, or counts are wrong."""
    account = Account(Random(1).randrange)
    for _ in range(100_000):
        account.step()
    assert account.seen == {(stage, name) for stage, ways in LEGAL.items() for name in ways}


class Lives(RuleBasedStateMachine):
    """The same, searched by hypothesis, which finds a short failing history."""

    @initialize(data=st.data())
    def begin(self, data):
        self.account = Account(lambda n: data.draw(st.integers(0, n - 1)))

    @rule(data=st.data())
    def step(self, data):
        self.account._pick = lambda n: data.draw(st.integers(0, n - 1))
        self.account.step()


TestLives = Lives.TestCase
TestLives.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
