"""The checks of `verify` that no fault of a single tiny server reaches, and what they read."""

from __future__ import annotations

import dataclasses
import math

import pytest

from sglang_triattn.config import Config
from sglang_triattn.rounds.rules import complete
from sglang_triattn.verify.checks import CHECKS, any_failed
from sglang_triattn.verify.checks_of_memory import active, bound, counters, freed, metrics, report
from sglang_triattn.verify.client import Answer, Ask, State, metric_sum
from sglang_triattn.verify.finding import Finding, difference, largest_gap
from sglang_triattn.verify.traffic import Evidence, Load, config_of

SMALL = {"budget": 16, "interval": 8, "recent": 4, "prompt": "frozen"}
REPORT = {"rounds": 2, "evicted_tokens": 16, "freed_slots": 16, "physical_length": 65, "logical_length": 81}
METRICS = """\
# TYPE sglang:triattention_rounds_total counter
sglang:triattention_rounds_total{model="a b",rank="0"} 3.0
sglang:triattention_rounds_total{model="a",rank="1"} 4.0 1395066363000
sglang:triattention_rounds_total_created{rank="1"} 1e9
sglang:other 5
"""


def answer(output=(1, 2, 3), logprobs=(-0.1, -0.2, -0.3), others=None, control=None, **report) -> Answer:
    others = others or [{token: value, 9: -3.0} for token, value in zip(output, logprobs, strict=True)]
    ask = Ask([5] * 48, len(output), control or SMALL)
    return Answer(ask, list(output), list(logprobs), others, [], report, cached=47, retractions=0)


def state(rounds=0, **more) -> State:
    sums = {"rounds": rounds, "evicted_tokens": 8 * rounds, "freed_slots": 8 * rounds, "pressure_rounds": 0}
    return State({}, [{**sums, **more}], {name: float(value) for name, value in sums.items()})


def evidence(report=REPORT, *, page_size=1, shared=False, rounds=2) -> Evidence:
    found = Evidence(complete(Config()), page_size, 1e-4, state(), Load(0, 0), shared, tree=True)
    compressed = answer(output=[1] * 34, logprobs=[-0.1] * 34, **report)
    found.small = compressed
    found.after = state(rounds)
    return found


def test_metric_sum():
    """Prevents reading another metric's samples, or a time as a value."""
    assert metric_sum(METRICS, "sglang:triattention_rounds_total") == 7
    assert metric_sum(METRICS, "sglang:other") == 5
    assert metric_sum(METRICS, "sglang:missing") == 0


def test_settings_come_from_the_server():
    """Prevents a failure with a server that reports more than settings."""
    rules = complete(Config(budget=512, recent=99), window=64, page_size=16)
    assert config_of({**dataclasses.asdict(rules), "rounds": 7}) == rules


def test_difference():
    """Prevents near ties from failing, and another answer from passing."""
    one = answer()
    assert difference(one, answer(logprobs=(-0.1, -0.25, -0.3)), 0, 3) == pytest.approx(0.05)
    assert difference(one, answer(logprobs=(-0.1, -0.25, -0.3)), 2, 3) == 0
    tie = [{1: -0.1}, {2: -0.2, 7: -0.21}, {3: -0.3}]
    parted = answer((1, 7, 8), (-0.1, -0.2, -5), [{1: -0.1}, {7: -0.2, 2: -0.205}, {8: -5.0}])
    assert difference(answer(others=tie), parted, 0, 3) == pytest.approx(0.01)
    assert difference(one, parted, 0, 3) == math.inf
    assert largest_gap([1.0], [1.0, 2.0]) == math.inf


def test_a_replica_that_does_not_compress():
    """Prevents a load balancer from hiding a replica that serves uncompressed."""
    found = evidence()
    assert active(found).status == "passed"
    found.after = State({}, [*found.after.replicas, None])
    assert active(found) == Finding("failed", "1 of 2 replicas do not compress")


@pytest.mark.parametrize(
    ("rounds", "shared", "status", "words"),
    [
        (2, False, "passed", "rounds +2"),
        (3, False, "failed", "rose by 3, but these requests report 2; if others use the server, add --shared"),
        (3, True, "passed", "others' included"),
        (1, True, "failed", "rose by 1, but these requests report 2"),
    ],
)
def test_sums(rounds, shared, status, words):
    """Prevents blaming a server for its other users, and excusing it for having some."""
    for check in (counters, metrics):
        finding = check(evidence(rounds=rounds, shared=shared))
        assert finding.status == status
        assert words in finding.detail


@pytest.mark.parametrize(
    ("page_size", "slots", "status"),
    [(1, 16, "passed"), (1, 15, "failed"), (1, 17, "failed"), (8, 16, "passed"), (8, 8, "failed"), (8, 12, "failed")],
)
def test_freed(page_size, slots, status):
    """Prevents a law that any number of freed slots obeys."""
    assert freed(evidence({**REPORT, "freed_slots": slots}, page_size=page_size)).status == status


def test_freed_by_early_rounds():
    """Prevents blaming a server for rounds that ran early because its memory was short."""
    found = evidence({**REPORT, "freed_slots": 8}, page_size=8)
    found.after = state(2, pressure_rounds=1)
    assert freed(found).status == "passed"
    found.small.report["freed_slots"] = 40
    assert freed(found).status == "failed"


COMPACT = {"budget": 64, "interval": 8, "recent": 64, "prompt": "compact"}
CHUNKED = {"rounds": 4, "evicted_tokens": 110, "freed_slots": 110, "physical_length": 75, "logical_length": 185}


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({}, "passed"),
        ({"rounds": 3}, "passed"),
        ({"rounds": 1}, "failed"),
        ({"rounds": 14}, "failed"),
        ({"evicted_tokens": 118, "physical_length": 67, "freed_slots": 118}, "failed"),
        ({"evicted_tokens": 100, "physical_length": 85, "freed_slots": 100}, "failed"),
    ],
    ids=str,
)
def test_a_prompt_cut_into_chunks_where_memory_was_short(change, status):
    """Prevents blaming a server that cut a prompt into chunks that its settings do not predict: seen without a tree,
    in a pool of 900 slots with three parked rows. What no chunks explain still fails."""
    found = evidence()
    found.warm = found.dense = within_budget()
    found.small = dataclasses.replace(answer([1] * 24, [-0.1] * 24, control=COMPACT, **{**CHUNKED, **change}), cached=0)
    found.small.ask.ids[:] = [5] * 162
    assert report(found).status == status
    assert freed(found).status == "passed"


def within_budget() -> Answer:
    return answer([1], [-0.1], rounds=0, evicted_tokens=0, physical_length=48, logical_length=48)


@pytest.mark.parametrize(("held", "status"), [(72, "passed"), (73, "failed"), (0, "failed")])
def test_bound(held, status):
    """Prevents a bound that nothing exceeds: 48 frozen entries, a budget of 16 and an interval of 8."""
    assert bound(evidence({**REPORT, "physical_length": held})).status == status


def test_what_was_not_tested_does_not_fail():
    """Prevents an exit status of 1 for checks that could not be made."""
    assert not any_failed({"a": Finding("passed", ""), "b": Finding("not tested", "")})
    assert any_failed({"a": Finding("passed", ""), "b": Finding("failed", "")})


def test_every_check_says_what_it_finds():
    """Prevents a row whose failure has no explanation."""
    assert all((check.__doc__ or "").startswith("Finds ") for check in CHECKS.values())
