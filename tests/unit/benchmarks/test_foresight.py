"""What later queries look up is measured as transformers computes it, and choices that know it decide by it."""

import pytest
import torch
import transformers

from benchmarks.quality.choices import read_choice
from benchmarks.quality.foresight import BLOCK, LookedUp, by_questions, by_second_reading, by_text
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.solve.cli import main as solve_main
from benchmarks.quality.tokens import Asked
from quality_cases import words
from sglang_triattn.calibration.lookups import EPSILON
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


def test_what_a_second_reading_looks_up(folder, model):
    """Prevents attention of the first reading, and the request between the readings from being left out."""
    ids = words(3, 60)
    expected = attention_of(folder, ids + LEAD + ids)[:, :, 60:, :60].amax(2)
    torch.testing.assert_close(by_second_reading(model, tokenizer, ids).after(0), expected, atol=1e-4, rtol=1e-3)


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
@pytest.mark.parametrize("name", ["read-again", "oracle"])
def test_strength_and_value_decide_together(model, name, recent):
    """Prevents a center of other values, strengths of another head, and a sum that one part rules."""
    ids, shape = torch.tensor(words(6, 148)), shape_of(model)
    dense = compute_dense(model, ids)
    drawn = torch.Generator().manual_seed(1)
    # Of blocks of 64 tokens: the round comes before token 148.
    most = torch.rand(3, 2, 2, len(ids), generator=drawn)
    looked_up = most[2] if name == "oracle" else most[0]
    known = LookedUp(most, 64) if name == "oracle" else LookedUp(most[:1])
    facts = RowFacts("seed", len(ids), 20, shape.rope, looked_up=known)
    choice = read_choice(f"{name}:recent={recent}")
    assert (choice.reads_again, choice.foresees) == (name == "read-again", name == "oracle")
    setting = choice.setting(choice.config(48, 80), facts)
    cache = CompactedCache.for_model(model, [setting], capacity=len(ids), prompt_length=20)
    kept = []
    cache.rows.after_round = lambda row, plan: kept.append(cache.rows.positions_of(0)[..., 20:])
    replay(cache, dense)
    cache.rows.run_due_rounds()
    values = torch.stack([layer.values[0, :, 20:] for layer in dense.layers])
    center = values[:, :, 128 - recent :].mean(2, keepdim=True) if recent else torch.zeros(())
    importance = (looked_up[..., 20:] + EPSILON).log() + (values - center).norm(dim=-1).log()
    importance[..., 128 - recent :] = torch.inf
    expected = importance.topk(48).indices.sort(dim=-1).values + 20
    assert torch.equal(kept[0], expected)


def test_a_text_that_is_yet_to_be_written_is_not_read_again(folder):
    """Prevents a traceback where a choice needs what a model has not written."""
    with pytest.raises(SystemExit, match="read-again needs the whole text before it is written: leave it out here"):
        solve_main(["--model", str(folder), "--policies", "read-again"])
