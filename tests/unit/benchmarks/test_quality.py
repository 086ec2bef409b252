"""The quality benchmark measures what it says: answers, agreement, and how sure it is."""

import dataclasses

import pytest
import torch

from benchmarks.quality.cells import Unit
from benchmarks.quality.choices import ALL
from benchmarks.quality.table import difference, rows_of
from benchmarks.quality.tokens import Asked, Tokens
from quality_cases import cells_of, runner_of, stream_of
from recalling_model import FILLER, QUESTION, recalling_model


@pytest.mark.parametrize("fed", [False, True])
def test_dense_answers_are_the_models_own(model, fed):
    """Prevents questions that see one another, wrong positions, and answers compared one token too early or late."""
    stream = stream_of(model)
    cells = cells_of(["dense"], 0.5)
    found = runner_of(model, fed=fed).run(stream, cells)[cells[0]]
    right = {"odd": [], "even": []}
    for number, one in enumerate(stream.questions):
        ids = torch.tensor([stream.prompt + stream.private + one.text + one.answer])
        with torch.no_grad():
            logprobs = model(ids).logits[0, -1 - len(one.answer) : -1].log_softmax(-1)
        expected = bool((logprobs.argmax(-1) == torch.tensor(one.answer)).all())
        unit = found[one.task][number // 2]
        assert unit.right == expected
        assert unit.logprob == pytest.approx(float(logprobs[range(len(one.answer)), one.answer].mean()), abs=1e-3)
        right[one.task].append(expected)
    assert all(right["odd"])
    assert not all(right["even"])


def test_intervals_compare_with_the_base():
    """Prevents intervals that still compare with the default where another policy was named."""
    dense, default, newest = cells_of(["dense", "default", "newest"], 0.5)
    found = [
        {dense: {"a": [Unit(1.0, 0.0)] * 8}, default: {"a": [Unit(1.0, 0.0)] * 8}, newest: {"a": [Unit(0.0, 0.0)] * 8}}
    ]
    assert [(row["low"], row["high"]) for row in rows_of(found)] == [(0.0, 0.0), (0.0, 0.0), (-1.0, -1.0)]
    assert [(row["low"], row["high"]) for row in rows_of(found, "newest")] == [(1.0, 1.0), (1.0, 1.0), (0.0, 0.0)]


@pytest.mark.parametrize("fed", [False, True])
def test_a_whole_budget_changes_nothing(model, fed):
    """Prevents a policy that acts outside of rounds, and rows that see other tokens than they hold."""
    names = (*ALL, "settings:selection=per-head,recent=0.25", "value-norm:recent=0")
    cells = cells_of(names, 1.0)
    questions = stream_of(model)
    text = dataclasses.replace(questions, questions=(), score_last=150)
    for stream in (questions, text) if fed else (questions,):
        found = runner_of(model, fed=fed, rows=5).run(stream, cells)
        assert set(found) == set(cells)
        for cell in cells:
            for task, units in found[cells[0]].items():
                for mine, dense in zip(found[cell][task], units, strict=True):
                    assert (mine.right, mine.count) == (dense.right, dense.count)
                    assert mine.logprob == pytest.approx(dense.logprob, abs=1e-2)


def test_scored_text_is_teacher_forced(model):
    """Prevents scores of shifted targets, and blocks that lose tokens."""
    stream = dataclasses.replace(stream_of(model, questions=0), score_last=200)
    cells = cells_of(["dense", "newest"], 0.25)
    found = runner_of(model).run(stream, cells)
    ids = torch.tensor([stream.prompt + stream.private])
    with torch.no_grad():
        logprobs = model(ids).logits[0, 19:-1].log_softmax(-1)
    expected = logprobs.gather(1, ids[0, 20:, None])[:, 0]
    units = found[cells[0]]["text"]
    assert [unit.count for unit in units] == [64, 64, 64, 8] == [unit.right for unit in units]
    for unit, block in zip(units, expected.split(64), strict=True):
        assert unit.logprob == pytest.approx(float(block.sum()), abs=1e-2)
    assert sum(unit.right for unit in found[cells[1]]["text"]) < 190


def test_what_is_evicted_cannot_be_recalled():
    """Prevents figures that do not depend on what a policy keeps."""
    model = recalling_model()
    names = ("dense", "newest", "value-norm", "value-range", "key-norm", "random:recent=0")
    cells = cells_of(names, 0.25)
    right = dict.fromkeys(names, 0)
    for value in range(1, 8):
        private = [FILLER] * 200
        private[10 * value] = value
        asked = Asked("facts", [FILLER, QUESTION], [value])
        stream = Tokens(f"fact {value}", [FILLER] * 10, private, (asked,))
        found = runner_of(model).run(stream, cells)
        for cell in cells:
            right[cell.choice.name] += found[cell]["facts"][0].right
    # One head: a random sample of a quarter holds the fact or not.
    assert right.pop("random:recent=0") < 7
    assert right == {"dense": 7, "newest": 0, "value-norm": 7, "value-range": 7, "key-norm": 0}


def test_intervals():
    """Prevents certainty about differences that a few answers, or one stream, decide."""

    def streams(*rows):
        return [[Unit(float(right), -1.0) for right in row] for row in rows]

    base = streams([1, 0, 1, 0] * 3, [0, 0, 1, 1] * 3, [1] * 12)
    assert difference(base, base) == (0, 0)
    assert difference(streams([1] * 12, [1] * 12), streams([0] * 12, [0] * 12)) == (1, 1)
    # One more right answer in 36 is no proof; half of them is.
    low, high = difference(streams([1, 0, 1, 1] + [1, 0, 1, 0] * 2, [0, 0, 1, 1] * 3, [1] * 12), base)
    assert low == 0 < 1 / 36 < high < 0.2
    half = streams(*[[1, 0, 0, 1] * 3] * 3)
    low, high = difference(streams([1] * 12, [1] * 12, [1] * 12), half)
    assert 0.3 < low < 0.5 < high < 0.7
    # The same gain in only one of three streams is less certain.
    assert difference(streams([1] * 12, *[[1, 0, 0, 1] * 3] * 2), half)[0] == 0
    # Blocks of text count by their number of tokens.
    wide = [[Unit(64.0, 0.0, 64), Unit(0.0, 0.0, 8)]]
    assert difference(wide, [[Unit(0.0, 0.0, 64), Unit(0.0, 0.0, 8)]])[1] == 1
