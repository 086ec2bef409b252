"""Random histories of requests on SGLang's real memory management: no slot lost, wrongly shared, or poisoned."""

from __future__ import annotations

from collections import Counter

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from checks import check_rounds, decode_together
from histories import Conversing, run_histories
from memory import POOL
from sets import matrix, shown, wide
from simulation import Simulation

# Of the histories of most modes, `make test` runs half.
MORE = pytest.mark.parametrize("times", [1, wide(2)])


def run(examples: int, least_rounds: int = 3, **options) -> Counter:
    """Runs random histories under these options, with at least `least_rounds` each on average; counts their events."""
    counts = run_histories(examples, **options)
    assert counts["rounds"] > least_rounds * examples
    # In a full pool idle rows do not last.
    assert counts["resumed turns"] > 0 or options.get("pool", POOL) < POOL
    return counts


@pytest.mark.parametrize(("examples", "start"), [(60, 1), wide(300, 7)])
def test_random_histories_under_random_settings(examples, start):
    """Prevents failures that only combinations of settings cause, SGLang's own included; see `soak` for many more.

    Draws every setting that the tests below fix; those only make sure that each mode gets some histories of its own.
    """
    counts = run(examples, varied=True, start=start)
    for happened in (
        "flushes granted",
        "flushes refused",
        "unmaps",
        "stripped answers",
        "rows barred by SGLang",
        "rows cut before their newest tokens",
        "rounds of rows with inputs",
    ):
        assert counts[happened] > 0, happened
    # One in a hundred histories has them.
    if examples > 200:
        assert counts["rows found by their tokens"] > counts["rows resumed before their end"] > 0


@pytest.mark.parametrize(
    ("page_size", "radix"),
    [(1, True), (16, True), (1, False), wide(4, True), wide(4, False), wide(16, False)],
)
@MORE
def test_random_histories(page_size, radix, times):
    """Prevents leaks, double ownership, writes to the tree, lost or reordered tokens, and poisoned prefixes."""
    run(2 * times, page_size=page_size, radix=radix)


OTHER_SETTINGS = [
    {"selection": "union", "budget_scope": "total"},
    {"selection": "per-head"},
    {"selection": "per-layer-head", "budget_scope": "total"},
    {"selection": "per-layer-head", "value_share": 0.75},
    {"selection": "per-layer-head", "value_share": 1.0, "recency": 0.5},
    # More recent tokens than are appended between rounds: their order matters.
    {"selection": "shared-mean", "recent": 10},
    {"selection": "per-head", "recent": 9, "budget": 12, "interval": 5},
]


@pytest.mark.parametrize(("page_size", "settings"), matrix([1, 4, 16], OTHER_SETTINGS, strength=1), ids=shown)
@MORE
def test_random_histories_of_other_settings(page_size, settings, times):
    """Prevents the same in every mode, and when requests of one batch keep different numbers of tokens."""
    run(2 * times, page_size=page_size, **settings)


@pytest.mark.parametrize(
    ("page_size", "interval", "sinks", "prompt", "selection"),
    [
        (1, 5, 2, "compact", "per-layer-head"),
        wide(1, 5, 2, "compact", "shared-mean"),
        (4, 8, 2, "frozen", "shared-mean"),
        wide(4, 8, 2, "frozen", "per-layer-head"),
        (4, 8, 6, "compact", "per-layer-head"),
        wide(4, 8, 6, "compact", "shared-mean"),
        (16, 16, 2, "frozen", "shared-mean"),
        wide(16, 16, 2, "frozen", "per-layer-head"),
    ],
)
def test_random_histories_of_rows_that_are_cut(page_size, interval, sinks, prompt, selection):
    """Prevents the same when the newest tokens move up in the row, by whole pages, and not in the pool."""
    lengths = {"budget": 28, "interval": interval, "recent": 18, "pressure_budget": 22}
    counts = run(
        4, least_rounds=1, page_size=page_size, selection=selection, sinks=sinks, prompt=prompt, pool=160, **lengths
    )
    # Not all of them move up: an early round, or one between two chunks, may lose half a page.
    moves = page_size > 1 or selection == "per-layer-head"
    assert (counts["rows cut before their newest tokens"] > 3) == moves


@pytest.mark.parametrize(("page_size", "selection"), matrix([16, 4, 1], ["shared-mean", "per-layer-head"], strength=1))
def test_random_histories_of_compacted_prompts(page_size, selection):
    """Prevents prefill onto a shortened row from computing other tokens, at other places, or poisoning the tree."""
    settings = {"prompt": "compact", "selection": selection}
    counts = run(4, page_size=page_size, **settings)
    assert counts["prefill rounds"] > 3
    assert page_size > 1 or counts["shared starts of compacted rows"] > 0


@pytest.mark.parametrize("page_size", [wide(1), 4])
@MORE
def test_random_histories_in_a_full_pool(page_size, times):
    """Prevents unneeded early rounds, and early rounds that keep other tokens than the newest and the best."""
    settings = {"pressure_budget": 6, "interval": 12}
    counts = run(4 * times, least_rounds=1, page_size=page_size, pool=80, **settings)
    assert counts["early rounds"] > 0


DRAFTING = [
    {"selection": "shared-mean"},
    {"selection": "per-layer-head"},
    {"budget": 28, "interval": 16, "recent": 18, "pool": 160},
    {"budget": 13, "interval": 7, "recent": 10, "prompt": "compact"},
]


@pytest.mark.parametrize(("page_size", "settings"), matrix([1, 4, 16], DRAFTING, strength=1), ids=shown)
def test_random_histories_of_drafting_requests(page_size, settings):
    """Prevents the same where rows have reserves after their computed entries, which move when rounds close up."""
    run(5, least_rounds=1, page_size=page_size, reserve=10, **settings)


@pytest.mark.parametrize(
    ("page_size", "selection", "prompt"),
    matrix([1, 4, 16], ["shared-mean", "per-layer-head"], ["frozen", "compact"], strength=1),
)
def test_random_histories_of_requests_whose_drafts_are_queued(page_size, selection, prompt):
    """Prevents a round from moving, or giving away, slots that a queued step writes its drafts to."""
    settings = {"budget": 28, "interval": 16, "recent": 10, "pool": 160, "prompt": prompt, "selection": selection}
    run(3, least_rounds=1, page_size=page_size, reserve=10, queued=5, **settings)


@pytest.mark.parametrize(
    ("page_size", "settings"),
    [
        (1, {"selection": "shared-mean"}),
        wide(1, {"selection": "per-layer-head"}),
        wide(4, {"selection": "per-layer-head", "budget_scope": "total"}),
        (16, {"selection": "per-layer-head"}),
        wide(16, {"selection": "shared-mean"}),
        (1, {"selection": "per-layer-head", "reserve": 10, "queued": 5}),
        (4, {"selection": "per-head", "prompt": "compact", "turn_inputs": "keep"}),
    ],
    ids=shown,
)
@MORE
def test_random_histories_of_conversations(page_size, settings, times):
    """Prevents a round from evicting what a resumed turn brought, from any head, and rows out of order in the tree."""
    counts = run(2 * times, least_rounds=2, page_size=page_size, histories=Conversing, pool=320, **settings)
    assert counts["rounds of rows with inputs"] > 0


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_aborted_as_it_is_retracted(page_size):
    """Prevents a pool that runs out, which ends the server, where such a request prefills what it had without rounds:
    a compacted prompt and its answer may be longer than the pool."""
    sim = Simulation(page_size, prompt="compact")
    request = sim.request([5] * 90)
    assert sim.admit(request, 8, lambda chunked: check_rounds(sim, chunked))
    decode_together(sim, [request], 20)
    rounds = sim.prefill_rounds
    request.req.to_finish = FINISH_ABORT()
    sim.retract(request)
    longest = []

    def between_chunks(chunked):
        check_rounds(sim, chunked)
        longest.append(chunked.req.kv.kv_committed_len)

    assert sim.admit(request, 8, between_chunks)
    assert sim.prefill_rounds > rounds > 0
    assert max(longest) < 60
