"""Weights of look-ups are fitted to what the model attends to, and decide what stays as their formula says."""

import pytest
import torch
import transformers

from benchmarks.quality.choices import read_choice
from benchmarks.quality.cli import main
from benchmarks.quality.lookups import EPSILON, LookupsError, fitted, load_lookups, read_again, save_lookups, sizes
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.records import records
from benchmarks.quality.solve.cli import main as solve_main
from quality_cases import words
from sglang_triattn.model.rope import rotate
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import compute_dense, replay

LEAD = [7, 11, 13]


def tokenizer(text, **options):
    return {"input_ids": list(LEAD)}


def test_attention_of_the_second_reading(folder, model):
    """Prevents attention of the first reading, of later keys, of one chunk alone, or of one query head of a group."""
    ids = words(3, 60)
    keys, most = read_again(model, tokenizer, ids, chunk=50)
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attention = torch.stack(eager(torch.tensor([ids + LEAD + ids]), output_attentions=True).attentions)[:, 0]
    expected = attention[:, :, 60:, :60].amax(2).unflatten(1, (2, 3)).amax(2)
    torch.testing.assert_close(most, expected, atol=1e-4, rtol=1e-3)
    dense = torch.stack([layer.keys[0] for layer in compute_dense(model, ids).layers])
    torch.testing.assert_close(keys, dense)


def test_planted_weights_are_found(model):
    """Prevents weights of standardised sizes taken for those of sizes, and heads fitted to one another's."""
    rope = shape_of(model).rope
    drawn = torch.Generator().manual_seed(4)
    planted = 0.3 * torch.randn(2, 2, rope.inv_freq.numel(), generator=drawn)
    measured = []
    for _ in range(3):
        keys = torch.randn(2, 2, 700, rope.rotary_dim, generator=drawn)
        strength = (sizes(keys, rope) @ planted[..., None])[..., 0] - 4
        turned = rotate(keys, torch.arange(700), rope)
        measured.append((turned, (strength.exp() - EPSILON).clamp_min(0)))
    weights, explained = fitted(measured, rope)
    # The penalty takes 3 %.
    torch.testing.assert_close(weights, planted, atol=0.03, rtol=0.06)
    assert float(explained.min()) > 0.99


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("name", ["look-ups", "read-again"])
def test_strength_and_value_decide_together(model, name, recent):
    """Prevents a center of other values, strengths of another head, and a sum that one part rules."""
    ids, shape = torch.tensor(words(6, 148)), shape_of(model)
    dense = compute_dense(model, ids)
    drawn = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 2, shape.rope.inv_freq.numel(), generator=drawn)
    looked_up = torch.rand(2, 2, len(ids), generator=drawn)
    facts = RowFacts("seed", len(ids), 20, shape.rope, lookups=weights, looked_up=looked_up)
    choice = read_choice(f"{name}:recent={recent}")
    assert (choice.looks_up, choice.reads_again) == (name == "look-ups", name == "read-again")
    setting = choice.setting(choice.config(48, 80), facts)
    cache = CompactedCache.for_model(model, [setting], capacity=len(ids), prompt_length=20)
    kept = []
    cache.rows.after_round = lambda row, plan: kept.append(cache.rows.positions_of(0)[..., 20:])
    replay(cache, dense)
    cache.rows.run_due_rounds()
    keys, values = (
        torch.stack([getattr(layer, name)[0, :, 20:] for layer in dense.layers]) for name in ("keys", "values")
    )
    half = keys.shape[-1] // 2
    strength = torch.einsum("lhnf,lhf->lhn", torch.hypot(keys[..., :half], keys[..., half:]), weights)
    if name == "read-again":
        strength = (looked_up[..., 20:] + EPSILON).log()
    center = values[:, :, 128 - recent :].mean(2, keepdim=True) if recent else torch.zeros(())
    importance = strength + (values - center).norm(dim=-1).log()
    importance[..., 128 - recent :] = torch.inf
    expected = importance.topk(48).indices.sort(dim=-1).values + 20
    assert torch.equal(kept[0], expected)


def test_records_are_drawn_anew_and_again():
    """Prevents records that repeat themselves, so that nothing is looked up, and fits that differ from run to run."""
    made = records(1, ["alpha", "beta", "gamma", "delta"], 4000)
    assert made == records(1, ["alpha", "beta", "gamma", "delta"], 4000)
    assert len(made) >= 4000
    lines = [line for line in made.splitlines() if line]
    assert len(set(lines)) > 0.95 * len(lines)
    assert "{" not in made.replace('{"id"', "")


def test_weights_that_cannot_be_used(tmp_path, folder):
    """Prevents a traceback, or figures with the weights of another model."""
    path = str(tmp_path / "weights.safetensors")
    save_lookups(path, torch.ones(2, 2, 4))
    assert torch.equal(load_lookups(path, 2, 2), torch.ones(2, 2, 4))
    with pytest.raises(
        LookupsError, match="2 layers and 2 KV heads, but the model has 3 and 2: make them of this model"
    ):
        load_lookups(path, 3, 2)
    with pytest.raises(LookupsError, match="holds no weights: make it by"):
        load_lookups(str(tmp_path / "none"), 2, 2)
    for run in (main, solve_main):
        with pytest.raises(SystemExit, match="look-ups needs weights: make them by"):
            run(["--model", str(folder), "--policies", "look-ups"])


def test_a_text_that_is_yet_to_be_written_is_not_read_again(folder):
    """Prevents a traceback where a choice needs what a model has not written."""
    with pytest.raises(SystemExit, match="read-again needs the whole text before it is written: leave it out here"):
        solve_main(["--model", str(folder), "--policies", "read-again"])
