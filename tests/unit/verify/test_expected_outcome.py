"""What `verify` expects of rounds, without a server."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_triattn.config import Config
from sglang_triattn.rounds.plan import plan_round
from sglang_triattn.rounds.rules import complete
from sglang_triattn.verify.expected_outcome import (
    Outcome,
    first_round,
    frozen_length,
    is_possible,
    replay,
    tokens_to_generate,
)


def test_at_page_size_1():
    """Prevents a law that is off by one: 24 private entries make a round due, and 16 stay."""
    config = complete(Config(budget=16, interval=8, recent=4))
    given = {"prompt": 48, "frozen": 48, "page_size": 1}
    assert replay(config, logical=72, **given) == Outcome(0, 0, 0, 72)
    assert replay(config, logical=73, **given) == Outcome(1, 8, 8, 65)
    assert replay(config, logical=81, **given) == Outcome(2, 16, 16, 65)
    # Token 25 is the last whose log-probability comes from position 72 and before.
    assert first_round(config, prompt=48, frozen=48) == 25


def test_pages_that_nothing_divides():
    """Prevents counting evicted tokens as freed where only whole pages are."""
    config = complete(Config(budget=10, interval=5, recent=2))
    # 15 private entries after 16: 31 entries are 4 pages of 8, and so are 26.
    assert replay(config, prompt=16, frozen=16, logical=32, page_size=8) == Outcome(1, 5, 0, 27)
    assert replay(config, prompt=16, frozen=16, logical=38, page_size=8) == Outcome(2, 10, 0, 28)
    assert replay(config, prompt=18, frozen=16, logical=48, page_size=16) == Outcome(4, 20, 0, 28)
    assert replay(config, prompt=20, frozen=16, logical=40, page_size=2).freed_slots == 12


SHARES = st.sampled_from([0.0, 0.0, 0.25, 0.6])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_law_and_plan_agree(data):
    """Prevents a law that blames a server for doing as the package plans."""
    draw = data.draw
    budget, interval, page = draw(st.integers(4, 40)), draw(st.integers(1, 30)), draw(st.sampled_from([1, 2, 8, 16]))
    scope, prompt_rule = draw(st.sampled_from(["private", "total"])), draw(st.sampled_from(["frozen", "compact"]))
    share = draw(SHARES)
    config = complete(
        Config(budget=budget, interval=interval, recent=2, budget_scope=scope, prompt=prompt_rule, keep_share=share)
    )
    prompt, generated = draw(st.integers(1, 90)), draw(st.integers(2, 120))
    frozen, logical = frozen_length(config, prompt, 0, page), prompt + generated
    length, evicted, freed, rounds = prompt + 1, 0, 0, 0
    while length + evicted < logical:
        plan = plan_round(config, frozen=frozen, length=length, evicted_before=evicted, page_size=page)
        if plan is not None:
            length, rounds = plan.new_length, rounds + 1
            evicted, freed = evicted + plan.evicted_tokens, freed + plan.freed_slots
        length += 1
    reported = replay(config, prompt=prompt, frozen=frozen, logical=logical, page_size=page)
    assert reported == Outcome(rounds, evicted, freed, length)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_chunks_of_any_size_are_right(data):
    """Prevents blaming a server whose memory was short while a prompt was prefilled, and excusing one whose rounds are
    too many, or keep too much or too little."""
    draw = data.draw
    budget, interval, page = draw(st.integers(16, 64)), draw(st.integers(4, 32)), draw(st.sampled_from([1, 16]))
    share = draw(SHARES)
    config = complete(Config(budget=budget, interval=interval, recent=8, prompt="compact", keep_share=share))
    frozen = frozen_length(config, 0, draw(st.sampled_from([0, 48])), page)
    prompt = frozen + config.trigger(frozen) + draw(st.integers(1, 90))
    generated = 3 * interval + draw(st.integers(0, 20))
    reported = compacted(draw, config, prompt, generated, frozen, page)
    of = {"prompt": prompt, "frozen": frozen, "logical": prompt + generated}
    least = max(budget, math.ceil(share * (of["logical"] - frozen)))
    assert is_possible(config, reported, **of)
    for wrong in (
        {"rounds": 0},
        {"rounds": reported.evicted_tokens // interval + 1},
        {"evicted_tokens": reported.evicted_tokens + 1},
        {"physical_length": frozen + least - 1, "evicted_tokens": of["logical"] - frozen - least + 1},
        {"physical_length": reported.physical_length + interval + 1},
    ):
        assert not is_possible(config, dataclasses.replace(reported, **wrong), **of), wrong


def compacted(draw, config: Config, prompt: int, generated: int, frozen: int, page: int) -> Outcome:
    """What the package's rounds do to a request that is prefilled in chunks of random sizes."""
    length = evicted = freed = rounds = 0

    def run_due() -> None:
        nonlocal length, evicted, freed, rounds
        plan = plan_round(config, frozen=frozen, length=length, evicted_before=evicted, page_size=page)
        if plan is not None:
            length, rounds = plan.new_length, rounds + 1
            evicted, freed = evicted + plan.evicted_tokens, freed + plan.freed_slots

    left = prompt
    while left:
        chunk = min(left, draw(st.integers(1, prompt)))
        length, left = length + chunk, left - chunk
        if left:
            run_due()
    # The step after the prefill comes before any round.
    for step in range(generated):
        if step:
            run_due()
        length += 1
    return Outcome(rounds, evicted, freed, length)


@pytest.mark.parametrize("interval", [4, 8, 16, 128])
@pytest.mark.parametrize("least", range(30, 50))
def test_requests_end_between_rounds(interval, least):
    """Prevents blaming a server that looked once more at a request which was over."""
    config = complete(Config(budget=16, interval=interval, recent=4))
    tokens = tokens_to_generate(config, prompt=50, frozen=48, least=least)
    assert least <= tokens < least + interval
    rounds = {replay(config, prompt=50, frozen=48, logical=50 + tokens + at, page_size=1).rounds for at in (-1, 0, 1)}
    assert len(rounds) == 1
