"""Policies that draw anew at every round, and that combine the value criterion, choose by the formulas they name."""

import math

import torch

from benchmarks.quality.choices import read_choice
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.queries import QueryLog, recording
from benchmarks.quality.redrawn import RANK, drawn_for
from quality_cases import words
from sglang_triattn.config import Config
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import compute_dense, replay

FROZEN, TOKENS, KEPT, RECENT = 20, 148, 48, 8
IDS = words(6, TOKENS)


def first_round(model, name, ids=IDS, kept=KEPT, seed="seed"):
    """What the first round keeps of the candidates: [L, H_kv, kept - RECENT], and keys and values of all private."""
    log = QueryLog(2, shape_of(model).rope)
    with recording({0: log}):
        dense = compute_dense(model, torch.tensor(ids))
    facts = RowFacts(seed, len(ids), FROZEN, shape_of(model).rope, log)
    setting = read_choice(f"{name}:recent={RECENT}").setting(
        Config(budget=kept, interval=128 - kept, recent=RECENT), facts
    )
    cache = CompactedCache.for_model(model, [setting], capacity=len(ids), prompt_length=FROZEN)
    found = []
    cache.rows.after_round = lambda row, plan: found.append(cache.rows.positions_of(0)[..., FROZEN:-RECENT])
    replay(cache, dense)
    cache.rows.run_due_rounds()
    parts = (
        torch.stack([getattr(layer, name)[0, :, FROZEN:] for layer in dense.layers]) for name in ("keys", "values")
    )
    return found[0], *parts


def best(importance):
    aged = importance[..., : TOKENS - FROZEN - RECENT]
    return aged.topk(KEPT - RECENT).indices.sort(dim=-1).values + FROZEN


def distance(values):
    return (values - values[..., -RECENT:, :].mean(-2, keepdim=True)).norm(dim=-1).log()


def test_cur_draws_its_directions_at_every_round(model):
    """Prevents directions that stay for life, which cost VaSE's authors 23 points, and other ones for each run."""
    found, keys, values = first_round(model, "cur")
    seen = torch.randn(keys.shape[-1], RANK, generator=drawn_for("seed", TOKENS))
    assert torch.equal(found, best((keys @ seen).square().sum(-1) * (values @ seen).square().sum(-1)))
    assert torch.equal(first_round(model, "cur")[0], found)
    assert not torch.equal(torch.rand(9, generator=drawn_for("seed", 1)), torch.rand(9, generator=drawn_for("seed", 2)))
    assert not torch.equal(first_round(model, "cur", seed="other")[0], found)


def test_vase_protects_large_ranges_and_draws_by_attention(model):
    """Prevents a draw that ignores attention, one that always takes the most attended to, and ranges unprotected."""
    attention, _, values = first_round(model, "snapkv")
    spread = (values.amax(-1) - values.amin(-1))[..., : TOKENS - FROZEN - RECENT]
    protected = spread.topk(round(0.1 * KEPT)).indices + FROZEN
    counts = torch.zeros(2, 2, TOKENS)
    for number in range(40):
        found = first_round(model, "vase", seed=str(number))[0]
        assert bool((found[..., None, :] == protected[..., None]).any(-1).all())
        counts.scatter_add_(-1, found, torch.ones(found.shape))
    others = counts.scatter(-1, protected, torch.nan)[..., FROZEN : TOKENS - RECENT]
    liked = torch.zeros(2, 2, TOKENS, dtype=torch.bool).scatter(-1, attention, True)[..., FROZEN : TOKENS - RECENT]
    assert others[liked].nanmean() > 1.2 * others[~liked].nanmean()
    assert others[liked].nan_to_num(0).min() < 40


def test_value_attention_multiplies_both(model):
    """Prevents a combination that one part rules."""
    found, _, values = first_round(model, "value-attention")
    only_values = best(distance(values))
    only_attention = first_round(model, "snapkv")[0]
    shares = [
        (found[..., None] == other[..., None, :]).any(-1).float().mean() for other in (only_values, only_attention)
    ]
    assert all(0.4 < share < 1 for share in shares)


def test_spans_stay_together(model):
    """Prevents spans that begin elsewhere in each head, or that are ranked by a token which is not their largest."""
    found, _, values = first_round(model, "value-spans")
    aged = distance(values)[..., : TOKENS - FROZEN - RECENT]
    spans = torch.arange(aged.shape[-1]) // 16
    most = torch.stack([aged[..., spans == span].amax(-1) for span in range(8)], dim=-1)
    # In the first layer, equal tokens have equal values.
    for head in range(2):
        order = most[1, head].argsort(descending=True).tolist()
        expected, needed = [], KEPT - RECENT
        for span in order:
            inside = [number for number in range(aged.shape[-1]) if number // 16 == span]
            inside.sort(key=lambda number: -float(aged[1, head, number]))
            expected, needed = expected + inside[:needed], max(0, needed - len(inside))
        assert found[1, head].tolist() == sorted(number + FROZEN for number in expected)


def test_older_copies_go_first(model):
    """Prevents the newest copy of a value from being evicted, and tokens without a copy from counting as one."""
    once = words(8, 30)
    ids = IDS[:FROZEN] + once + once + IDS[FROZEN : TOKENS - 60]
    found, _, values = first_round(model, "value-copies", ids)
    aged = values[..., : TOKENS - FROZEN - RECENT, :]
    cosines = torch.nn.functional.cosine_similarity(aged[..., :, None, :], aged[..., None, :, :], dim=-1)
    copied = (cosines > 0.9).triu(1).any(-1)
    assert 0 < copied[0].float().mean() < 0.6
    expected = best(
        torch.nn.functional.pad(distance(values)[..., : aged.shape[-2]].masked_fill(copied, -math.inf), (0, 8))
    )
    assert torch.equal(found[0], expected[0])
