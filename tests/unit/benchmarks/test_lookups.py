"""Weights of look-ups are fitted to what the model attends to, and look-ups decide as their formula says."""

import pytest
import torch
import transformers

from benchmarks.quality.choices import read_choice
from benchmarks.quality.cli import main
from benchmarks.quality.foresight import BLOCK, by_questions, by_text
from benchmarks.quality.lookups import (
    EPSILON,
    LookedUp,
    LookupsError,
    fitted,
    load_lookups,
    read_again,
    save_lookups,
    sizes,
)
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.records import records
from benchmarks.quality.solve.cli import main as solve_main
from benchmarks.quality.tokens import Asked
from quality_cases import words
from sglang_triattn.model.rope import rotate
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import CHUNK, compute_dense, replay

LEAD = [7, 11, 13]


def tokenizer(text, **options):
    return {"input_ids": list(LEAD)}


def attention_of(folder, ids):
    """[L, H_kv, queries, keys], the most of the query heads that share a key, as transformers computes it."""
    eager = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        attention = torch.stack(eager(torch.tensor([ids]), output_attentions=True).attentions)[:, 0]
    return attention.unflatten(1, (2, 3)).amax(2)


def test_attention_of_the_second_reading(folder, model):
    """Prevents attention of the first reading, of later keys, of one chunk alone, or of one query head of a group."""
    ids = words(3, 60)
    keys, most = read_again(model, tokenizer, ids, chunk=50)
    expected = attention_of(folder, ids + LEAD + ids)[:, :, 60:, :60].amax(2)
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


def test_what_a_text_looks_up_later(folder, model):
    """Prevents earlier queries from counting, those of another chunk from being lost, and places of another row."""
    ids = words(3, CHUNK + 40)
    attention, found = attention_of(folder, ids), by_text(model, ids, len(ids) + 5)
    for position in (0, 20, CHUNK, len(ids), len(ids) + 4):
        start = min(position // BLOCK, (len(ids) - 1) // BLOCK) * BLOCK
        expected = torch.nn.functional.pad(attention[:, :, start:].amax(2), (0, 5))
        torch.testing.assert_close(found.after(position), expected, atol=1e-4, rtol=1e-3)


def test_what_questions_look_up(folder, model):
    """Prevents the answer's last token, or another question, from counting as what a question sees."""
    ids = words(3, 60)
    asked = [Asked("a", words(4, 5), words(5, 3)), Asked("b", words(6, 4), words(7, 1))]
    each = [attention_of(folder, ids + one.text + one.answer[:-1])[:, :, 60:, :60].amax(2) for one in asked]
    dense = compute_dense(model, ids)
    found = by_questions(model, dense, asked)
    torch.testing.assert_close(found.after(0), torch.maximum(*each), atol=1e-4, rtol=1e-3)
    assert torch.equal(found.after(1000), found.after(0))
    assert dense.get_seq_length() == 60


@pytest.mark.parametrize("recent", [0, 8])
@pytest.mark.parametrize("name", ["look-ups", "read-again", "oracle"])
def test_strength_and_value_decide_together(model, name, recent):
    """Prevents a center of other values, strengths of another head, and a sum that one part rules."""
    ids, shape = torch.tensor(words(6, 148)), shape_of(model)
    dense = compute_dense(model, ids)
    drawn = torch.Generator().manual_seed(1)
    weights = torch.randn(2, 2, shape.rope.inv_freq.numel(), generator=drawn)
    # Of blocks of 64 tokens: the round comes before token 148.
    most = torch.rand(3, 2, 2, len(ids), generator=drawn)
    looked_up = most[2] if name == "oracle" else most[0]
    known = LookedUp(most, 64) if name == "oracle" else LookedUp(most[:1])
    facts = RowFacts("seed", len(ids), 20, shape.rope, lookups=weights, looked_up=known)
    choice = read_choice(f"{name}:recent={recent}")
    needs = {"look-ups": choice.looks_up, "read-again": choice.reads_again, "oracle": choice.foresees}
    assert needs == {other: other == name for other in needs}
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
    if name != "look-ups":
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
