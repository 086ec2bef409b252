"""Random histories of requests over SGLang's real memory management: no slot lost, shared by mistake, or poisoned."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sglang_triattn.patches.compressor import Compressor
from sglang_triattn.patches.rows import Rows

from checks import check_books, check_rounds, check_row
from simulation import POOL, Simulation

# Few tokens and common stems, so that prefixes are shared often.
STEMS = [[5] * 20, [5] * 9 + [6] * 30, [7] * 3]
TOKENS = st.integers(1, 4)
CHUNKS = st.integers(5, 60)


class Histories(RuleBasedStateMachine):
    """Admit, decode, compress, retract, finish, abort, go on from an answer, flush."""

    page_size = 1
    radix = True
    pool = POOL
    settings: ClassVar[dict] = {}
    rounds = 0
    early_rounds = 0
    prefill_rounds = 0
    resumed = 0
    shared_starts = 0

    @initialize()
    def start(self):
        self.sim = Simulation(self.page_size, self.radix, pool=self.pool, **self.settings)

    def _admit(self, running, chunk):
        # Chunks end on pages, as SGLang's do.
        chunk = max(chunk - chunk % self.page_size, self.page_size)
        return self.sim.admit(running, chunk, lambda chunked: check_rounds(self.sim, chunked))

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 40),
        tail=st.lists(st.integers(1, 4), max_size=6),
        chunk=st.integers(5, 60),
    )
    def admit(self, stem, cut, tail, chunk):
        self._admit(self.sim.request([*stem[:cut], *tail, 8]), chunk)

    @precondition(lambda self: self.sim.finished)
    @rule(which=st.integers(0, 99), tail=st.lists(TOKENS, min_size=1, max_size=4))
    def next_turn(self, which, tail):
        """A multi-turn client: what a finished request said comes back as a prompt."""
        history = self.sim.finished[which % len(self.sim.finished)]
        self._admit(self.sim.request([*history[:90], *tail]), 1000)

    @rule(
        name=st.sampled_from("ab"),
        tail=st.lists(TOKENS, min_size=1, max_size=4),
        chunk=CHUNKS,
        other=st.sampled_from([False, False, False, True]),
        steps=st.integers(0, 30),
    )
    def talk(self, name, tail, chunk, other, steps):
        """A turn of a conversation: it goes on from what was said, or says something else under the same name."""
        said = self.sim.spoken.get(name, [])
        if other or len(said) > 110:
            said = [7] * 3
        turn = self.sim.request([*said, *tail], conversation=name)
        if self._admit(turn, chunk):
            self.decode(steps)
            if steps % 2 and turn in self.sim.running:
                self.sim.release(turn, finish=True)

    @precondition(lambda self: self.sim.running)
    @rule(steps=st.integers(1, 25))
    def decode(self, steps):
        for _ in range(steps):
            check_rounds(self.sim)
            for running in list(self.sim.running):
                if not self.sim.decode(running):
                    self.sim.release(running, finish=True)

    @precondition(lambda self: self.sim.running)
    @rule(which=st.integers(0, 99))
    def finish(self, which):
        self.sim.release(self.sim.running[which % len(self.sim.running)], finish=True)

    @precondition(lambda self: self.sim.running)
    @rule(which=st.integers(0, 99))
    def retract(self, which):
        self.sim.retract(self.sim.running[which % len(self.sim.running)])

    @precondition(lambda self: self.sim.waiting)
    @rule(chunk=CHUNKS)
    def resume(self, chunk):
        running = self.sim.waiting.pop(0)
        if not self._admit(running, chunk):
            self.sim.waiting.append(running)

    @precondition(lambda self: not self.sim.running and self.radix)
    @rule()
    def flush(self):
        self.sim.conversations._on_flush(None)
        self.sim.tree.reset()
        self.sim.allocator.clear()
        self.sim.rows.clear()

    @invariant()
    def books_balance(self):
        if hasattr(self, "sim"):
            check_books(self.sim)

    @invariant()
    def rows_hold_their_own(self):
        if hasattr(self, "sim"):
            for running in self.sim.running:
                check_row(self.sim, running)

    def teardown(self):
        for running in list(self.sim.running):
            self.sim.release(running, finish=True)
        check_books(self.sim)
        while self.sim.conversations.drop_one():
            check_books(self.sim)
        type(self).resumed += self.sim.resumed
        type(self).shared_starts += self.sim.shared_starts
        type(self).rounds += self.sim.rounds
        type(self).early_rounds += self.sim.early_rounds
        type(self).prefill_rounds += self.sim.prefill_rounds


def run_histories(examples: int, least_rounds: int = 3, **options) -> type[Histories]:
    """Random histories under these options, `least_rounds` each on average; the class that counted the rounds."""
    machine = type("Machine", (Histories,), options)
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(
            max_examples=examples,
            stateful_step_count=40,
            derandomize=True,
            deadline=None,
            # A failure is found again by its seed; making it smaller takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert machine.rounds > least_rounds * examples
    # In a full pool, idle rows do not last.
    assert machine.resumed > 0 or machine.pool < POOL
    return machine


@pytest.mark.parametrize("radix", [True, False], ids=["radix", "no-radix"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_histories(page_size, radix):
    """Prevents leaks, double ownership, writes to the tree, lost or reordered tokens, and poisoned prefixes."""
    run_histories(40, page_size=page_size, radix=radix)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    "settings",
    [
        {"selection": "union", "budget_scope": "total"},
        {"selection": "per-head"},
        {"selection": "per-layer-head", "budget_scope": "total"},
        # More recent tokens than come between rounds: order matters, so that K/V slides.
        {"selection": "shared-mean", "recent": 10},
        {"selection": "per-head", "recent": 9, "budget": 12, "interval": 5},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_random_histories_of_other_settings(page_size, settings):
    """Prevents the same in every mode, and where requests of one batch keep different numbers of tokens."""
    run_histories(16, page_size=page_size, settings=settings)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("selection", ["shared-mean", "per-layer-head"])
def test_random_histories_of_compacted_prompts(page_size, selection):
    """Prevents prefill onto a shortened row from computing other tokens, at other places, or poisoning the tree."""
    settings = {"prompt": "compact", "selection": selection}
    machine = run_histories(24, page_size=page_size, settings=settings)
    assert machine.prefill_rounds > 12
    assert page_size > 1 or machine.shared_starts > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_random_histories_in_a_full_pool(page_size):
    """Prevents early rounds without need, or from keeping other tokens than the newest and the best."""
    settings = {"pressure_budget": 6, "interval": 12}
    machine = run_histories(24, least_rounds=1, page_size=page_size, settings=settings, pool=80)
    assert machine.early_rounds > 0


def poisoned_history(page_size: int) -> int:
    """A request that evicts and finishes, then a turn that goes on from its answer; returns the rounds that ran."""
    sim = Simulation(page_size)
    first = sim.request([5] * 8)
    assert sim.admit(first, 1000)
    for _ in range(60):
        check_rounds(sim)
        sim.decode(first)
    sim.release(first, finish=True)
    second = sim.request([*sim.finished[0], 9])
    assert sim.admit(second, 1000)
    check_row(sim, second)
    check_books(sim)
    return sim.rounds


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_oracle_notices_a_poisoned_tree(page_size, monkeypatch):
    """Prevents an oracle that cannot fail: without the bar from the tree, the next turn must read foreign content."""
    assert poisoned_history(page_size) >= 5
    record = Compressor._record

    def record_and_forget_the_bar(self, request, *rest):
        record(self, request, *rest)
        request.skip_radix_cache_insert = False

    def release_without_guard(self, original, req, tree_cache, *, checkpoint):
        original(req, tree_cache, checkpoint=checkpoint)

    monkeypatch.setattr(Compressor, "_record", record_and_forget_the_bar)
    # The package's own guard would notice first.
    monkeypatch.setattr(Rows, "release", release_without_guard)
    with pytest.raises(AssertionError, match="hold other content"):
        poisoned_history(page_size)
