"""The arithmetic of a decode step's bytes: rows, rounds, ceilings and the break-even."""

import json

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.common import MODELS
from benchmarks.rounds.score_traffic import BUDGET, default_bytes
from plan_cases import CONFIGS, LLAMA3_8B, shape
from sglang_triattn.capacity import Gpus, Workload, largest, peak_tokens
from sglang_triattn.config import Config
from sglang_triattn.gpus import GPUS
from sglang_triattn.model.layout import read_layout
from sglang_triattn.model.sizes import read_sizes, weight_bytes
from sglang_triattn.rounds.plan import Plan
from sglang_triattn.rounds.rules import complete
from sglang_triattn.traffic import Model, break_even, decode, kv_reads, mean_step, round_bytes, traffic

CONTEXT = 3000
SMALL = shape("llama", 256, 4, 8, 2, intermediate_size=512, vocab_size=1000) | {"max_position_embeddings": CONTEXT}
SIZES = read_sizes(SMALL)
GPUS_OF_SMALL = Gpus(1 << 30, 0.0, 0, 0, 1, 1)
MODEL = Model(SIZES, GPUS_OF_SMALL, "bfloat16", weight_bytes(SIZES, SMALL))
BUDGETS, INTERVALS = st.integers(4, 1500), st.integers(1, 400)
SCOPES = st.sampled_from(["private", "total"])


def layout_of(name: str):
    return read_layout(json.loads((CONFIGS / f"{name}.json").read_text()))


@settings(deadline=None, max_examples=40)
@given(
    budget=BUDGETS,
    interval=INTERVALS,
    prompt=st.integers(1, 1000),
    answer=st.integers(0, 2000),
    page_size=st.sampled_from([1, 16, 64]),
    scope=SCOPES,
)
def test_rows_stay_within_their_peak(budget, interval, prompt, answer, page_size, scope):
    """Prevents steps that read more than a request may hold, or that lose tokens without a round."""
    rules = complete(Config(budget=budget, interval=interval, budget_scope=scope))
    workload = Workload(prompt, prompt + answer)
    found = decode(rules, workload, page_size)
    assert len(found.rows) == answer
    assert max(found.rows, default=prompt) <= max(peak_tokens(rules, workload, page_size), prompt + 1)
    evicted = 0
    for step, row in enumerate(found.rows):
        assert row == prompt + step + 1 - evicted
        evicted += found.rounds[step].evicted_tokens if step in found.rounds else 0
    assert decode(None, workload, page_size).rows == tuple(range(prompt + 1, prompt + answer + 1))


@settings(deadline=None, max_examples=40)
@given(
    budget=BUDGETS,
    interval=INTERVALS,
    prompt=st.integers(1, 1000),
    answer=st.integers(1, 2000),
    requests=st.integers(1, 4096),
    scope=SCOPES,
)
def test_ceilings(budget, interval, prompt, answer, requests, scope):
    """Prevents a ceiling below 1 where compression reads less, above that of KV alone, or above 1 without a round."""
    rules, workload = (
        complete(Config(budget=budget, interval=interval, budget_scope=scope)),
        Workload(prompt, prompt + answer),
    )
    found = traffic(MODEL, rules, workload, requests)
    for dense, compressed, ceiling in (
        (found.dense_mean, found.compressed_mean, found.ceiling_mean),
        (found.dense_end, found.compressed_end, found.ceiling_end),
    ):
        assert (ceiling >= 1) == (compressed.total <= dense.total)
        assert compressed.kv <= dense.kv
        assert ceiling <= dense.kv / compressed.kv + 1e-9
        assert compressed.weights == dense.weights
    if not decode(rules, workload, 1).rounds:
        assert found.ceiling_mean == found.ceiling_end == 1
    more = traffic(MODEL, rules, workload, requests + 1)
    if found.ceiling_mean >= 1:
        assert more.ceiling_mean >= found.ceiling_mean - 1e-9


def never(length: int | None) -> float:
    return float("inf") if length is None else length


@settings(deadline=None, max_examples=20)
@given(budget=BUDGETS, interval=INTERVALS, prompt=st.integers(4, 1000))
def test_the_break_even_grows_with_what_stays(budget, interval, prompt):
    """Prevents a break-even that falls where more of a request stays, or that comes before the first round."""
    one, larger = (complete(Config(budget=budget + more, interval=interval, recent=4)) for more in (0, 1))
    found = never(break_even(MODEL, one, prompt))
    assert found > prompt + budget + interval
    assert never(break_even(MODEL, larger, prompt)) >= found
    # One more token of prompt stays in every step, dense and compressed.
    assert never(break_even(MODEL, one, prompt + 1)) in (found + 1, float("inf"))


@settings(deadline=None, max_examples=20)
@given(budget=BUDGETS, interval=INTERVALS, prompt=st.integers(1, 1000))
def test_the_break_even_is_where_whole_answers_are_equal(budget, interval, prompt):
    """Prevents a break-even that the bytes of whole answers contradict."""
    rules = complete(Config(budget=budget, interval=interval))
    found = break_even(MODEL, rules, prompt)
    assume(found is not None)

    def gain(length: int) -> float:
        workload = Workload(prompt, length)
        return mean_step(MODEL, None, workload, 1).total - mean_step(MODEL, rules, workload, 1).total

    assert gain(found) > 0 >= gain(found - 1) - 1e-6
    assert all(gain(length) > 0 for length in {*range(found, CONTEXT + 1, 97), CONTEXT})


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_rounds_cost_what_the_benchmark_counts(model, kv_dtype):
    """Prevents two counts of the same bytes that differ, and a cost from which more than a twentieth is missing."""
    fields = shape("llama", model.q_heads * model.head_dim, model.layers, model.q_heads, model.kv_heads)
    rules = complete(Config(budget=BUDGET))
    plan = Plan(frozen=0, old_length=2176, new_length=BUDGET, next_position=2176, freed_slots=128)
    found = round_bytes(read_layout(fields), rules, plan, kv_dtype=kv_dtype, ranks=1, page_size=1)
    parts = default_bytes(model, 1, 2176, 1 if kv_dtype == "fp8_e4m3" else 2)
    assert (found.keys, found.values, found.moves) == (parts["keys"], parts["values"], parts["moves"])
    assert found.scores == parts["scores written"] + parts["scores read"]
    assert 0.95 < found.total / sum(parts.values()) < 1


def test_rounds_that_rewrite_rows_move_nothing():
    """Prevents moves where all layers and heads keep one set and a page is a token, and values that are not read."""
    plan = Plan(frozen=0, old_length=2176, new_length=2048, next_position=2176, freed_slots=128)
    rules = complete(Config(selection="shared-mean"))
    for page_size, moved in ((1, 0), (16, 128 * 131072 * 2)):
        found = round_bytes(read_layout(LLAMA3_8B), rules, plan, kv_dtype="bfloat16", ranks=1, page_size=page_size)
        assert (found.moves, found.values) == (moved, 0)


def test_rows_that_stay_in_order_move_all_older_tokens():
    """Prevents the cost of a recency from being left out of a plan."""
    plan = Plan(frozen=0, old_length=2176, new_length=2048, next_position=2176, freed_slots=128)
    rules = complete(Config(recency=0.25))
    found = round_bytes(read_layout(LLAMA3_8B), rules, plan, kv_dtype="bfloat16", ranks=1, page_size=1)
    assert found.moves == (2048 - rules.recent) * 131072 * 2


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        # 4 layers of 26 see all tokens, the others 512 of them, from the same pool.
        ("gemma-3-1b", 10_000, (4 * 10_000 + 22 * 512) * 2 * 256 * 2),
        ("gemma-3-1b", 100, 26 * 100 * 2 * 256 * 2),
        # Layers that read the KV of another read it once more: 7 see all tokens, 28 a window of 512.
        ("gemma-4-e2b", 10_000, 7 * 10_000 * 2 * 512 * 2 + 28 * 512 * 2 * 256 * 2),
        # 31 of 80 layers have room in the pool and no attention.
        ("nemotron-super-49b", 10_000, 49 * 10_000 * 2 * 8 * 128 * 2),
        # States of fixed size are not counted: 12 of 48 layers have KV.
        ("qwen3-next-80b-a3b", 10_000, 12 * 10_000 * 2 * 2 * 256 * 2),
        ("deepseek-v3", 10_000, 61 * 10_000 * 576 * 2),
    ],
)
def test_kv_of_unequal_layers(name, row, expected):
    """Prevents whole rows for layers with a window, and reads for layers that have room and no attention."""
    assert kv_reads(layout_of(name), "bfloat16", 1).of(row) == expected


def test_largest():
    """Prevents a search that is one off at either end."""
    for limit in range(1, 9):
        assert largest(lambda number, limit=limit: number <= limit, 1, 8) == limit
    assert largest(lambda number: number <= 0, 1, 8) is None
    assert largest(lambda number: True, 5, 4) is None


def test_the_table_of_gpus():
    """Prevents a bandwidth in another unit: every known GPU reads all of its memory in 15 to 60 ms."""
    for gpu in GPUS.values():
        assert 0.015 < gpu.memory_bytes / gpu.bandwidth < 0.06
