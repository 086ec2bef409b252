"""Random histories of requests, under given or random settings, with everything checked after every step."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import ClassVar

from hypothesis import HealthCheck, Phase, seed
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

from checks import check_books, check_rounds, check_row
from memory import ROWS
from memory_saver import flush, release_memory
from running import Running
from sglang_triattn.request.options import CompressionOptions
from simulation import Simulation

STEPS = 40
"""Most steps of one history."""

SHORT_ANSWER = 40
"""Most tokens of every third answer under random settings."""

# Few tokens and common stems, so that prefixes are shared often.
STEMS = [[5] * 20, [5] * 9 + [6] * 30, [7] * 3]
TOKENS = st.integers(1, 4)
CHUNKS = st.integers(5, 60)
RARELY = st.sampled_from([False] * 7 + [True])
# A message, or what a tool returns.
INPUTS = st.lists(TOKENS, min_size=1, max_size=4) | st.lists(TOKENS, min_size=12, max_size=40)
# Tokens at the end of a text that its next turn does not repeat: another tokenisation, an edit, a retry.
LESS = st.sampled_from([0] * 10 + [1, 2, 5, 9, 14])
ABORTS = st.sampled_from([None] * 9 + [0, 1, 2])

SETTINGS = st.fixed_dictionaries(
    {
        "page_size": st.sampled_from([1, 4, 16, 32]),
        "pool": st.sampled_from([96, 192]),
        "radix": st.sampled_from([True, True, True, False]),
        "strip_thinking": st.booleans(),
        "force_miss": st.sampled_from([False, False, False, True]),
        "eviction": st.sampled_from(["lru", "lfu", "slru", "priority", "tlru"]),
        "selection": st.sampled_from(["shared-mean", "union", "per-head", "per-layer-head"]),
        "budget_scope": st.sampled_from(["private", "total"]),
        "prompt": st.sampled_from(["frozen", "compact"]),
        "sinks": st.sampled_from([0, 2, 4, 12]),
        "value_share": st.sampled_from([0.0, 0.4, 0.75, 1.0]),
        "recency": st.sampled_from([0.0, 0.5]),
        "conversations": st.sampled_from(["named", "auto"]),
    }
)
# If more tokens are recent than are appended between rounds, their order matters: rows are cut before them, or K/V
# slides where that would cut a page. Pages can be cut if an interval is a whole number of them.
LENGTHS = st.sampled_from(
    [
        {"budget": 13, "interval": 7, "recent": 3},
        {"budget": 13, "interval": 7, "recent": 3, "pressure_budget": 6},
        {"budget": 13, "interval": 12, "recent": 3, "pressure_budget": 6},
        {"budget": 13, "interval": 7, "recent": 10, "rounds_per_step": "auto"},
        {"budget": 12, "interval": 5, "recent": 9, "pressure_budget": 10},
        {"budget": 13, "interval": 8, "recent": 3, "pressure_budget": 6, "rounds_per_step": 1},
        {"budget": 17, "interval": 8, "recent": 11, "rounds_per_step": 2},
        {"budget": 29, "interval": 16, "recent": 18, "pressure_budget": 21},
        {"budget": 13, "interval": 7, "recent": 3, "keep_share": 0.5},
        {"budget": 12, "interval": 5, "recent": 9, "pressure_budget": 10, "keep_share": 0.3},
    ]
)
ASKED = st.sampled_from(["nothing", "nothing", "nothing", "declined", "less", "the other prompt"])


class Histories(RuleBasedStateMachine):
    """Admit, decode, compress, retract, finish, abort, continue an answer, flush, unmap."""

    options: ClassVar[dict] = {}
    varied: ClassVar[bool] = False
    counts: ClassVar[Counter] = Counter()

    @initialize(settings=SETTINGS, lengths=LENGTHS)
    def start(self, settings, lengths):
        drawn = {**settings, **lengths} if self.varied else {}
        chosen = {**drawn, **self.options}
        if chosen.get("selection") != "per-layer-head":
            # It has no meaning for other selections.
            chosen.pop("value_share", None)
        if not chosen.get("value_share"):
            chosen.pop("recency", None)
        self.sim = Simulation(**chosen)
        self.counts["histories"] += 1

    def _admit(self, running, chunk, abort_at=None):
        # Chunks end at page boundaries, like SGLang's.
        chunk = max(chunk - chunk % self.sim.page_size, self.sim.page_size)
        if self.varied and int(running.req.rid[1:]) % 3 == 0:
            # An answer that ends before the context does, so that some need less than a round would leave them.
            running.req.sampling_params.max_new_tokens = SHORT_ANSWER
        return self.sim.admit(running, chunk, lambda chunked: check_rounds(self.sim, chunked), abort_at)

    def _asked(self, asked: str, conversation: str | None = None) -> CompressionOptions:
        config = self.sim.config
        options = self.sim.options(conversation)
        if not self.varied or asked == "nothing":
            return options
        if asked == "declined" and conversation is None:
            return CompressionOptions(None)
        if asked == "the other inputs":
            other = "compact" if config.keeps_inputs else "keep"
            return replace(options, settings=replace(config, turn_inputs=other))
        if asked == "the other prompt":
            other = {"frozen": "compact", "compact": "frozen"}[config.prompt]
            return replace(options, settings=replace(config, prompt=other))
        pressure = None if config.pressure_budget is None else 5
        return replace(options, settings=replace(config, budget=9, interval=4, recent=2, pressure_budget=pressure))

    @rule(
        stem=st.sampled_from(STEMS),
        cut=st.integers(1, 40),
        tail=st.lists(TOKENS, max_size=6),
        chunk=CHUNKS,
        asked=ASKED,
        thinks=st.booleans(),
        barred=RARELY,
        abort_at=ABORTS,
    )
    def admit(self, stem, cut, tail, chunk, asked, thinks, barred, abort_at):
        request = self.sim.request(
            [*stem[:cut], *tail, 8], asked=self._asked(asked), thinks=thinks, barred=barred and self.varied
        )
        self._admit(request, chunk, abort_at if self.varied else None)

    @precondition(lambda self: self.sim.finished or self.sim.running or self.sim.waiting)
    @rule(which=st.integers(0, 99), less=LESS, tail=INPUTS, steps=st.integers(5, 35), thinks=st.booleans())
    def next_turn(self, which, less, tail, steps, thinks):
        """A multi-turn client: a request's text, finished or so far, comes back as a prompt, whole or less its end."""
        unfinished = [running.tokens for running in (*self.sim.running, *self.sim.waiting)]
        texts = [*self.sim.finished, *unfinished]
        history = self.sim.finished[-1] if which % 2 and self.sim.finished else texts[which % len(texts)]
        self._admit(self.sim.request([*history[: max(min(110, len(history) - less), 0)], *tail], thinks=thinks), 1000)
        self.decode(steps)

    @rule(
        name=st.sampled_from("ab"),
        tail=INPUTS,
        chunk=CHUNKS,
        other=st.sampled_from([False, False, False, True]),
        less=LESS,
        asked=st.sampled_from(["nothing", "nothing", "the other prompt", "the other inputs"]),
        steps=st.integers(0, 30),
        thinks=st.booleans(),
        barred=RARELY,
        abort_at=ABORTS,
    )
    def talk(self, name, tail, chunk, other, less, asked, steps, thinks, barred, abort_at):
        """A turn of a conversation: it continues the conversation's text, or says something else under its name."""
        text = self.sim.spoken.get(name, [])
        if other or len(text) > 110:
            text = [7] * 3
        asked = self._asked(asked if name == "a" else "less", name)
        text = text[: max(len(text) - less, 0)]
        turn = self.sim.request([*text, *tail], asked=asked, thinks=thinks, barred=barred and self.varied)
        if self._admit(turn, chunk, abort_at if self.varied else None):
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

    def _one(self, which: int) -> Running:
        return self.sim.running[which % len(self.sim.running)]

    @precondition(lambda self: self.sim.running)
    @rule(which=st.integers(0, 99), abort=RARELY, overrun=st.booleans())
    def finish(self, which, abort, overrun):
        self.sim.release(self._one(which), finish=True, abort=abort, overrun=overrun)

    @precondition(lambda self: self.sim.running)
    @rule(which=st.integers(0, 99))
    def retract(self, which):
        self.sim.retract(self._one(which))
        self.counts["retractions"] += 1

    @precondition(lambda self: self.sim.waiting)
    @rule(chunk=CHUNKS)
    def resume(self, chunk):
        running = self.sim.waiting.pop(0)
        if not self._admit(running, chunk):
            self.sim.waiting.append(running)

    @precondition(lambda self: self.sim.running or self.sim.conversations.records())
    @rule(busy=RARELY, unmap=st.booleans())
    def flush(self, busy, unmap):
        """A flush, or the release of the KV memory; SGLang refuses while a request runs or other work is queued."""
        sim, granted = self.sim, not (busy or self.sim.running)
        idle, names = (
            list(sim.conversations.records()),
            [name for name in sim.conversations.idle() if name in ("a", "b")],
        )
        assert (release_memory if unmap else flush)(sim, granted=granted) == granted
        if granted:
            assert not sim.conversations.records(), "a flushed row is still kept"
            assert (sim.slots.available_size(), sim.rows.available_size()) == (sim.pool_size, ROWS)
            # The copy of the row of a turn that waits, because it was retracted, is lost too.
            sim.kept_once.update(names)
            self.counts["rows lost by flushes"] += len(idle)
        else:
            assert list(sim.conversations.records()) == idle, "a refused flush took a conversation's row"
            self.counts["rows that outlived a refused flush"] += len(idle)
        self.counts["flushes granted" if granted else "flushes refused"] += 1
        self.counts["unmaps"] += unmap

    @invariant()
    def books_balance(self):
        if hasattr(self, "sim"):
            check_books(self.sim)

    @invariant()
    def rows_hold_their_own(self):
        if hasattr(self, "sim"):
            self.counts["steps"] += 1
            for running in self.sim.running:
                check_row(self.sim, running)

    def teardown(self):
        if not hasattr(self, "sim") or sys.exc_info()[0] is not None:
            # Report the violation itself, not what it does to the end of the history.
            return
        for running in list(self.sim.running):
            self.sim.release(running, finish=True)
        check_books(self.sim)
        while self.sim.conversations.drop_one():
            check_books(self.sim)
        self.counts.update(self.sim.counts())


class Conversing(Histories):
    """Mostly turns of conversations, which bring more than the model generates."""

    @rule(name=st.sampled_from("ab"), tail=INPUTS, chunk=CHUNKS, steps=st.integers(10, 35))
    def go_on(self, name, tail, chunk, steps):
        self._talk_on(name, tail, chunk, steps)

    @rule(name=st.sampled_from("ab"), tail=INPUTS, chunk=CHUNKS, steps=st.integers(10, 35))
    def go_on_again(self, name, tail, chunk, steps):
        self._talk_on(name, tail, chunk, steps)

    def _talk_on(self, name, tail, chunk, steps):
        spoken = self.sim.spoken.get(name, [7] * 3)
        text = spoken if len(spoken) < 110 else [7] * 3
        turn = self.sim.request([*text, *tail], asked=self._asked("nothing", name))
        if self._admit(turn, chunk):
            self.decode(steps)
            if turn in self.sim.running:
                self.sim.release(turn, finish=True)


class Repeating(Conversing):
    """The same, and turns that are aborted, sent again, or sent twice at the same time."""

    @initialize(settings=SETTINGS, lengths=LENGTHS)
    def start(self, settings, lengths):
        super().start(settings, lengths)
        self.prompts = {}

    def _talk_on(self, name, tail, chunk, steps):
        spoken = self.sim.spoken.get(name, [7] * 3)
        self.prompts[name] = [*(spoken if len(spoken) < 110 else [7] * 3), *tail]
        self._send(name, chunk, steps, end="answered")

    def _send(self, name, chunk, steps, end):
        # Turns of one conversation ask for the same, as in `talk`: of a row that other settings have left out of order,
        # a round keeps fewer of the newest tokens.
        turn = self.sim.request(self.prompts[name], asked=self._asked("nothing" if name == "a" else "less", name))
        if not self._admit(turn, chunk):
            return
        self.decode(steps)
        if turn in self.sim.running and end != "runs on":
            self.sim.release(turn, finish=True, abort=end == "aborted")

    @precondition(lambda self: self.prompts)
    @rule(
        name=st.sampled_from("ab"),
        chunk=CHUNKS,
        steps=st.integers(0, 30),
        end=st.sampled_from(["answered", "aborted", "aborted", "runs on"]),
    )
    def send_again(self, name, chunk, steps, end):
        if name in self.prompts:
            self._send(name, chunk, steps, end)


def run_histories(
    examples: int,
    *,
    start: int | None = None,
    varied: bool = False,
    histories: type[Histories] = Histories,
    **options,
) -> Counter:
    """Runs random histories and counts their events.

    Args:
        examples: number of histories.
        start: seed of the random numbers; None for the same ones in every run.
        varied: whether each history draws its settings, and its requests ask for settings of their own.
        histories: what may happen.
        options: for every Simulation.
    """
    counts = Counter()
    machine = type("Machine", (histories,), {"options": options, "varied": varied, "counts": counts})
    if start is not None:
        seed(start)(machine)
    run_state_machine_as_test(
        machine,
        settings=hypothesis_settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            derandomize=start is None,
            database=None,
            report_multiple_bugs=False,
            deadline=None,
            # A failure is reproduced by its seed; shrinking it takes minutes.
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return counts
