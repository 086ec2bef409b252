"""Weights of look-ups are fitted to what a model attends to, kept in its statistics, and read by rounds."""

import dataclasses

import pytest
import torch
import transformers

from benchmarks.quality.choices import read_choice
from benchmarks.quality.cli import main
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.solve.cli import main as solve_main
from quality_cases import random_stats, words
from sglang_triattn.calibration import lookups
from sglang_triattn.calibration.job import CalibrationError
from sglang_triattn.calibration.lookups import (
    EPSILON,
    LookupSums,
    Measured,
    attention_to,
    features,
    lookup_inputs,
    read_again,
    strongest_attention,
)
from sglang_triattn.calibration.records import records
from sglang_triattn.calibration.transformers_engine import calibrate
from sglang_triattn.model.rope import Rope, rotate
from sglang_triattn.rounds.scoring import lookup_weights
from sglang_triattn.stats.file import StatsError, load_stats, save_stats
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import compute_dense, replay
from sglang_triattn.transformers_cache.policy import Setting
from tiny_models import COMMON, make_model, make_text

LEAD = [7, 11, 13]


def with_weights(model):
    stats = random_stats(model)
    drawn = torch.randn(2, 2, stats.mean.shape[-1] + stats.head_dim, generator=torch.Generator().manual_seed(1))
    return dataclasses.replace(stats, lookups=drawn)


def test_attention_of_the_second_reading(folder, model, monkeypatch):
    """Prevents attention of the first reading, of later keys, of one chunk alone, or of one query head of a group."""
    monkeypatch.setattr(lookups, "_CHUNK", 50)
    ids = words(3, 60)
    found = read_again(model.base_model, LEAD, ids, {0: 0, 1: 1})
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attention = torch.stack(eager(torch.tensor([ids + LEAD + ids]), output_attentions=True).attentions)[:, 0]
    expected = attention[:, :, 60:, :60].amax(2).unflatten(1, (2, 3)).amax(2)
    torch.testing.assert_close(found.most, expected, atol=1e-4, rtol=1e-3)
    dense = compute_dense(model, ids).layers
    torch.testing.assert_close(found.keys, torch.stack([layer.keys[0] for layer in dense]))
    torch.testing.assert_close(found.values, torch.stack([layer.values[0] for layer in dense]))


def test_attention_is_the_same_in_chunks(monkeypatch):
    """Prevents queries that see keys after their own, or keys of their chunk alone."""
    drawn = torch.Generator().manual_seed(5)
    queries, keys = torch.randn(4, 33, 8, generator=drawn), torch.randn(2, 60, 8, generator=drawn)
    whole = attention_to(queries, keys, 27).amax(1)
    monkeypatch.setattr(lookups, "_CHUNK", 7)
    torch.testing.assert_close(strongest_attention(queries, keys, 27), whole)
    assert not torch.allclose(strongest_attention(queries[:, :-7], keys[:, :-7], 27), whole)


def test_planted_weights_are_found(model):
    """Prevents weights of standardised features taken for those of features, and heads fitted to one another's."""
    rope = shape_of(model).rope
    drawn = torch.Generator().manual_seed(4)
    planted = 0.3 * torch.randn(2, 2, rope.inv_freq.numel() + 6, generator=drawn)
    sums = LookupSums(rope)
    for _ in range(3):
        keys = torch.randn(2, 2, 700, rope.rotary_dim, generator=drawn)
        values = torch.randn(2, 2, 700, 6, generator=drawn)
        strength = (features(keys, values, rope) @ planted[..., None])[..., 0] - 4
        turned = rotate(keys, torch.arange(700), rope)
        sums.add(Measured(turned, values, (strength.exp() - EPSILON).clamp_min(0)))
    # The penalty takes 3 %.
    torch.testing.assert_close(sums.weights(), planted, atol=0.03, rtol=0.06)


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_weights_of_many_heads_are_solved_on_two_threads(two_threads):
    """Prevents a solver that fails where a program has set its number of threads, as `torch.linalg.solve` does."""
    drawn = torch.Generator().manual_seed(8)
    inv_freq = 10_000 ** (-torch.arange(64) / 64)
    sums = LookupSums(Rope(inv_freq, 1.0, 128, "half"))
    keys, values = (torch.randn(28, 2, 300, 128, generator=drawn) for _ in "kv")
    sums.add(Measured(keys, values, torch.rand(28, 2, 300, generator=drawn)))
    assert sums.weights().shape == (28, 2, 192)


def test_nan_keys_are_refused(model):
    """Prevents a traceback of the solver, or weights that choose nothing."""
    sums = LookupSums(shape_of(model).rope)
    keys, values = torch.randn(2, 2, 40, shape_of(model).rope.rotary_dim), torch.randn(2, 2, 40, 6)
    keys[1, 0, 20] = torch.nan
    sums.add(Measured(keys, values, torch.rand(2, 2, 40)))
    with pytest.raises(CalibrationError, match="NaN or infinite keys"):
        sums.weights()


def kept_by(model, setting, stats, ids):
    """[L, H_kv, kept]: positions of the private tokens that a row's first round keeps, the prompt's 20 left out."""
    cache = CompactedCache.for_model(model, [setting], stats, capacity=len(ids), prompt_length=20)
    replay(cache, compute_dense(model, ids))
    cache.rows.run_due_rounds()
    return cache.rows.positions_of(0)[..., 20:]


def looked_up(model, ids, stats, recent):
    """[L, H_kv, n]: by the formula, how strongly private tokens may be looked up, times their values' distance."""
    dense = compute_dense(model, ids)
    keys = torch.stack([layer.keys[0, :, 20:] for layer in dense.layers])
    values = torch.stack([layer.values[0, :, 20:] for layer in dense.layers])
    half = keys.shape[-1] // 2
    found = torch.cat([torch.hypot(keys[..., :half], keys[..., half:]), values], -1)
    strength = torch.einsum("lhnf,lhf->lhn", found, stats.lookups)
    center = values[:, :, 128 - recent :].mean(2, keepdim=True) if recent else torch.zeros(())
    return strength + (values - center).norm(dim=-1).log()


def assert_best(kept, importance, recent):
    """The newest tokens stay, and the best of the others."""
    importance = importance.clone()
    importance[..., 128 - recent :] = torch.inf
    # Equal tokens have keys and values of one size in the first layer, so they are compared by what they are worth.
    expected = importance.topk(48).values.sort(dim=-1).values
    worth = importance.gather(-1, kept - 20).sort(dim=-1).values
    torch.testing.assert_close(worth, expected, rtol=1e-5, atol=1e-5)


def test_older_tokens_count_less(model):
    """Prevents ages of other tokens, and a decay that rules alone or not at all."""
    ids, stats = torch.tensor(words(6, 148)), with_weights(model)
    facts = RowFacts("seed", len(ids), 20, shape_of(model).rope, None, stats)
    choices = [read_choice(f"{name}:recent=8") for name in ("look-ups", "look-ups-near")]
    far, near = (kept_by(model, each.setting(each.config(48, 80), facts), stats, ids) for each in choices)
    assert near.float().mean() > far.float().mean() + 1
    aged = looked_up(model, ids, stats, 8) - 0.25 * torch.arange(128, 0, -1).log()
    assert_best(near, aged, 8)
    # Until its first round, a row holds as many newer tokens as a token is old.
    server = Setting(read_choice("settings:recency=0.25,recent=8").config(48, 80))
    assert_best(kept_by(model, server, stats, ids), aged, 8)


@pytest.mark.parametrize("recent", [0, 8])
def test_the_servers_scorer_agrees_with_the_control(model, recent):
    """Prevents a center of other values, strengths of another head, and a sum that one part rules."""
    ids, stats = torch.tensor(words(6, 148)), with_weights(model)
    facts = RowFacts("seed", len(ids), 20, shape_of(model).rope, None, stats)
    choice = read_choice(f"look-ups:recent={recent}")
    assert choice.looks_up
    server = read_choice(f"settings:value_share=1,recent={recent}").config(48, 80)
    for setting in (choice.setting(choice.config(48, 80), facts), Setting(server)):
        assert_best(kept_by(model, setting, stats, ids), looked_up(model, ids, stats, recent), recent)


def test_weights_are_left_out(model):
    """Prevents a comparison of weights with themselves."""
    ids, stats = torch.tensor(words(6, 148)), with_weights(model)
    facts = RowFacts("seed", len(ids), 20, shape_of(model).rope, None, stats)
    choices = [read_choice(name) for name in ("settings:weights=no", "default")]
    settings = [choice.setting(choice.config(48, 80), facts) for choice in choices]
    kept = []
    for setting, given in zip(
        [*settings, settings[1]], [stats, dataclasses.replace(stats, lookups=None), stats], strict=True
    ):
        kept.append(kept_by(model, setting, given, ids))
    assert torch.equal(kept[0], kept[1])
    assert not torch.equal(kept[0], kept[2])


def test_records_are_drawn_anew_and_again():
    """Prevents records that repeat themselves, so that nothing is looked up, and fits that differ from run to run."""
    made = records(1, ["alpha", "beta", "gamma", "delta"], 4000)
    assert made == records(1, ["alpha", "beta", "gamma", "delta"], 4000)
    assert len(made) >= 4000
    lines = [line for line in made.splitlines() if line]
    assert len(set(lines)) > 0.95 * len(lines)
    assert "{" not in made.replace('{"id"', "")


def test_statistics_keep_weights(tmp_path, model):
    """Prevents weights that a file loses, those of other heads on a rank or of other layers in a stage, and a file
    whose weights no model can have."""
    stats, path = with_weights(model), tmp_path / "stats.safetensors"
    save_stats(stats, path)
    assert torch.equal(load_stats(path).lookups, stats.lookups)
    assert torch.equal(stats.of_layers([1]).lookups, stats.lookups[1:])
    assert torch.equal(lookup_weights(stats, 1, "cpu", slice(3, 6)), stats.lookups[:, 1:])
    # Where there are more ranks than KV heads, each has a copy of one.
    assert torch.equal(lookup_weights(stats, 1, "cpu", slice(4, 5)), stats.lookups[:, 1:])
    assert lookup_weights(random_stats(model), 1, "cpu") is None
    for wrong in (stats.lookups[:, :1], stats.lookups[..., : stats.mean.shape[-1]], stats.lookups * torch.nan):
        save_stats(dataclasses.replace(stats, lookups=wrong), path)
        with pytest.raises(StatsError, match="is damaged"):
            load_stats(path)


def test_calibration_fits_weights(tmp_path, monkeypatch):
    """Prevents weights of layers that are not scored, a fit on other texts, and a text without words for records."""
    monkeypatch.setattr(lookups, "WINDOW", 60)
    monkeypatch.setattr(lookups, "MIN_WORDS", 5)
    windows = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
    folder = make_model(tmp_path / "model", transformers.Olmo3Config(**COMMON, **windows))
    text = tmp_path / "text.txt"
    make_text(text, 400)
    stats = calibrate(str(folder), str(text), max_tokens=360, window=120, progress=False, lookups=True)
    assert stats.lookups.shape == (1, stats.num_kv_heads, stats.mean.shape[-1] + stats.head_dim)
    assert bool(stats.lookups.any())
    assert calibrate(str(folder), str(text), max_tokens=360, window=120, progress=False).lookups is None
    monkeypatch.setattr(lookups, "MIN_WORDS", 10**6)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    with pytest.raises(CalibrationError, match="words of 3 to 9 letters, but look-ups need 1000000: give more"):
        lookup_inputs(tokenizer, [[5, 6, 7]])


def test_weights_that_are_wanting(tmp_path, folder, model):
    """Prevents a traceback."""
    path = str(tmp_path / "stats.safetensors")
    save_stats(random_stats(model), path)
    for run in (main, solve_main):
        with pytest.raises(SystemExit, match="look-ups needs look-up weights: name statistics made by"):
            run(["--model", str(folder), "--stats", path, "--policies", "look-ups"])
