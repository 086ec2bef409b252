"""The quality benchmark's policies choose by the formulas that they name; settings are what a server derives."""

import dataclasses

import pytest
import torch
import transformers

from benchmarks.quality.choices import ChoiceError, read_choice
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.queries import QueryLog, recording
from quality_cases import INTERVAL, words
from sglang_triattn.config import Config, read_settings
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import compute_dense, replay
from sglang_triattn.transformers_cache.policy import Setting


def held_by(model, name, budget, *, recent, tokens=400):
    """Positions [L, H_kv, n] of the private tokens held right after the last round, and where that round ended."""
    choice = read_choice(f"{name}:recent={recent}")
    ids = torch.tensor(words(5, tokens))
    facts = RowFacts("seed", tokens, 20, shape_of(model).rope)
    setting = choice.setting(choice.config(budget, INTERVAL), facts)
    cache = CompactedCache.for_model(model, [setting], capacity=tokens, prompt_length=20)
    last = []
    cache.rows.after_round = lambda row, plan: last.append((cache.rows.positions_of(0)[..., 20:], plan.next_position))
    replay(cache, compute_dense(model, ids))
    assert len(last) >= 5
    return *last[-1], setting.make_policy(cache.rows.pools)


@pytest.mark.parametrize("recent", [0, 24])
@pytest.mark.parametrize("name", ["random", "random-shared", "random-spans"])
def test_random_samples_are_uniform_and_nested(model, name, recent):
    """Prevents random controls that favour old or new tokens because priorities are drawn again at every round."""
    found, end, policy = held_by(model, name, 64, recent=recent)
    ages = torch.arange(end - recent - 20)
    drawn = policy.drawn[..., ages // policy.span] if name != "random" else policy.drawn[..., 20 + ages]
    order = drawn.expand(2, 2, -1).sort(dim=-1, descending=True, stable=True).indices[..., : 64 - recent]
    assert torch.equal(found[..., : 64 - recent], 20 + order.sort(dim=-1).values)
    assert torch.equal(found[..., 64 - recent :], torch.arange(end - recent, end).expand(2, 2, -1))
    more, same, _ = held_by(model, name, 96, recent=recent)
    assert same == end
    assert bool((found[..., None] == more[..., None, :]).any(-1).all())
    if name == "random":
        assert not torch.equal(found[0, 0], found[1, 1])


def first_kept(model, name, ids):
    """What the first round keeps of 128 private tokens after 20 others: [L, H_kv, 48 - recent] of the aged ones."""
    log = QueryLog(2, shape_of(model).rope)
    with recording({0: log}):
        dense = compute_dense(model, ids)
    facts = RowFacts("seed", len(ids), 20, shape_of(model).rope, log)
    setting = read_choice(f"{name}:recent=0").setting(Config(budget=48, interval=80, recent=0), facts)
    cache = CompactedCache.for_model(model, [setting], capacity=len(ids), prompt_length=20)
    kept = []
    cache.rows.after_round = lambda row, plan: kept.append(cache.rows.positions_of(0)[..., 20:])
    replay(cache, dense)
    cache.rows.run_due_rounds()
    return kept[0]


def overlap(one, other):
    """Share of common numbers, over all heads."""
    return float((one[..., None] == other[..., None, :]).any(-1).double().mean())


def test_snapkv_reads_the_models_attention(folder, model):
    """Prevents a window, a mask, a scale or a pooling that is not SnapKV's."""
    ids = torch.tensor(words(6, 148))
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attention = eager(ids[None], output_attentions=True).attentions
    weights = torch.stack(attention)[:, 0, :, -64:, 20:].mean(2)
    pooled = torch.nn.functional.avg_pool1d(weights, 5, stride=1, padding=2).unflatten(1, (2, 3)).mean(2)
    expected = pooled.topk(48).indices + 20
    assert overlap(first_kept(model, "snapkv", ids), expected) > 0.99


def test_r_kv_weighs_attention_against_redundancy(folder, model):
    """Prevents keys compared with themselves, another window than R-KV's, or redundancy that is rewarded."""
    ids = torch.tensor(words(6, 148))
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attention = eager(ids[None], output_attentions=True).attentions
    weights = torch.stack(attention)[:, 0, :, -8:, 20:].mean(2)
    pooled = torch.nn.functional.avg_pool1d(weights, 5, stride=1, padding=2).unflatten(1, (2, 3)).mean(2)
    keys = torch.stack([layer.keys[0, :, 20:] for layer in compute_dense(model, ids).layers])
    cosines = torch.nn.functional.cosine_similarity(keys[..., :, None, :], keys[..., None, :, :], dim=-1)
    others = cosines.masked_fill(torch.eye(128, dtype=torch.bool), 0).sum(-1) / 127
    expected = 0.1 * pooled / pooled.sum(-1, keepdim=True) - 0.9 * others.softmax(-1)
    assert overlap(first_kept(model, "r-kv", ids), expected.topk(48).indices + 20) > 0.99


def test_expected_attention_by_its_definition(model):
    """Prevents statistics of rotated queries, a rotation to other positions, or a softmax over other keys."""
    ids, queries = torch.tensor(words(6, 148)), []
    for layer in model.model.layers:
        handle = layer.self_attn.q_proj.register_forward_hook(lambda module, given, out: queries.append(out[0]))
        layer.handle = handle
    cache = compute_dense(model, ids)
    for layer in model.model.layers:
        layer.handle.remove()
    cos, sin = model.model.rotary_emb(torch.zeros(1), torch.arange(148, 148 + 512)[None])
    size = cos.shape[-1]
    swap = torch.zeros(size, size)
    swap[size // 2 :, : size // 2], swap[: size // 2, size // 2 :] = torch.eye(size // 2), -torch.eye(size // 2)
    turn = (cos[0][:, None] * torch.eye(size) + sin[0][:, None] * swap).mean(0)
    expected = []
    for layer, given in zip(cache.layers, queries, strict=True):
        scores = []
        for head in range(6):
            q = given[4:, head * size : (head + 1) * size]
            k, v = (part[0, head // 3, 4:] for part in (layer.keys, layer.values))
            mean, covariance = turn @ q.mean(0), turn @ torch.cov(q.T, correction=0) @ turn.T
            logits = k @ mean / size**0.5 + torch.einsum("ni,ij,nj->n", k, covariance, k) / size / 2
            scores.append(logits.softmax(0) * v.norm(dim=-1))
        expected.append(torch.stack(scores).unflatten(0, (2, 3)).mean(1)[:, 16:].topk(48).indices + 20)
    assert overlap(first_kept(model, "expected-attention", ids), torch.stack(expected)) > 0.99


def test_default_is_what_a_server_derives():
    """Prevents a default with other recent tokens, or another selection, than a user gets."""
    for budget in (64, 512):
        expected = read_settings({"enable_triattention": True, "triattention_budget": budget})
        assert read_choice("default").config(budget, None) == expected
        assert read_choice("default").setting(expected, None) == Setting(expected)
    named = read_choice("settings:selection=per-layer-head,recent=0.25,aggregation=max,sinks=2")
    found = named.config(64, 16)
    assert (found.budget, found.interval, found.recent) == (64, 16, 16)
    assert (found.selection, found.aggregation, found.sinks) == ("per-layer-head", "max", 2)
    assert read_choice("settings:early=96").setting(expected, None) == Setting(expected, early=96)
    others = ("budget", "rounds_per_step", "stats")
    for field in dataclasses.fields(Config):
        if field.name not in others and isinstance(field.default, int | float | str):
            name = f"settings:{field.name}={field.default if field.name != 'recent' else 8}"
            assert read_choice(name).control is None
    for wrong in ("sorted", "dense:recent=1", "settings:budget=3", "settings:recent", "newest:recent=two",
                  "settings:recent=100", "settings:early=97", "settings:early=0.5"):  # fmt: skip
        with pytest.raises(ChoiceError):
            read_choice(wrong)
