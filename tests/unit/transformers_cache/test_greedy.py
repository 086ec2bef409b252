"""Greedy generation in the cache for transformers: drafts change how often the model is called, and nothing else."""

import pytest
import torch

from cache_cases import CONFIG, PROMPT, UNLIMITED, make_cache
from sglang_triattn.stats.file import load_stats
from sglang_triattn.transformers_cache.feed import feed
from sglang_triattn.transformers_cache.greedy import Draft, generate
from sglang_triattn.transformers_cache.policy import CacheError
from tiny_model import VOCABULARY, build_tiny_model

LIMIT = 180


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return build_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(tiny):
    return tiny.load()


@pytest.fixture(scope="module")
def stats(tiny):
    return load_stats(tiny.stats)


@pytest.fixture(scope="module")
def prompt():
    return torch.randint(3, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(9))


def started(model, stats, prompt, settings):
    """A cache that holds the prompt, the first token of each row, and the positions held after each round."""
    cache = make_cache(model, settings, stats)
    first = feed(model, cache, prompt).argmax(-1)[:, 0].tolist()
    kept = []
    cache.rows.after_round = lambda row, plan: kept.append((row, plan, cache.rows.positions_of(row)))
    return cache, first, kept


@pytest.fixture(scope="module")
def alone(model, stats, prompt):
    """Setting -> text and rounds of a row that is fed one token at a time."""
    found = {}
    for setting in (CONFIG, UNLIMITED):
        cache, text, kept = started(model, stats, prompt, [setting])
        while len(text) < LIMIT:
            text.append(int(feed(model, cache, text[-1:]).argmax()))
        found[setting] = (text, kept)
    assert len(found[CONFIG][1]) > 2
    assert found[CONFIG][0] != found[UNLIMITED][0]
    return found


def drafts_of(alone, kind):
    own = [alone[CONFIG][0], alone[UNLIMITED][0]]
    if kind == "the other row's":
        return own[::-1]
    if kind == "with gaps":
        return [[token for place, token in enumerate(text) if place % 7] for text in own]
    return {"none": None, "own": own, "wrong": [[5] * LIMIT] * 2}[kind]


@pytest.mark.parametrize("kind", ["none", "own", "the other row's", "with gaps", "wrong"])
def test_text_and_rounds_are_those_without_drafts(model, stats, prompt, alone, kind):
    """Prevents accepting a token that the model would not write, and rounds that see rejected ones."""
    cache, first, kept = started(model, stats, prompt, [CONFIG, UNLIMITED])
    texts = generate(model, cache, first, limit=LIMIT, drafts=drafts_of(alone, kind))
    assert texts == [alone[CONFIG][0], alone[UNLIMITED][0]]
    assert len(kept) == len(alone[CONFIG][1])
    for (row, plan, positions), (_, expected_plan, expected) in zip(kept, alone[CONFIG][1], strict=True):
        assert (row, plan) == (0, expected_plan)
        assert torch.equal(positions, expected)


def test_right_drafts_save_calls(model, stats, prompt, alone):
    """Prevents drafts that lose their place after a token, which would make long texts as slow as without."""
    calls = {}
    for kind in ("none", "own", "with gaps"):
        cache, first, _ = started(model, stats, prompt, [CONFIG, UNLIMITED])
        count = []
        generate(
            model,
            cache,
            first,
            limit=LIMIT,
            drafts=drafts_of(alone, kind),
            settled=lambda *_, count=count: count.append(1),
        )
        calls[kind] = len(count)
    assert calls["none"] > 60
    assert calls["own"] <= 20
    assert calls["with gaps"] < calls["none"]


def test_a_text_ends_at_its_own_stop(model, stats, prompt, alone):
    """Prevents texts that go on after their end, one row's end ending another, and drafts that hide a stop."""
    stop = next(token for token in alone[CONFIG][0][70:] if token not in alone[UNLIMITED][0])
    ends = [text.index(stop) + 1 if stop in text else LIMIT for text, _ in alone.values()]
    cache, first, _ = started(model, stats, prompt, [CONFIG, UNLIMITED])
    held = []
    texts = generate(
        model, cache, first, limit=LIMIT, stop={stop}, drafts=drafts_of(alone, "own"),
        settled=lambda _, rows: held.append(list(rows)),
    )  # fmt: skip
    assert texts == [text[:end] for (text, _), end in zip(alone.values(), ends, strict=True)]
    assert ends[0] < ends[1]
    assert (held[0], held[-1]) == ([0, 1], [1])


def test_a_draft_finds_its_place_again():
    """Prevents drafts that are lost for good after a few other tokens."""
    draft = Draft(range(100))
    text = list(range(20))
    draft.advance(text, 20)
    for token in (500, 501, 40, 41):
        text.append(token)
        draft.advance(text, 1)
    assert draft.next(3) == [42, 43, 44]
    repeating = Draft()
    text = [7, 8, 9, 7]
    repeating.advance(text, 4)
    text.append(8)
    repeating.advance(text, 1)
    assert repeating.next(2) == [9, 7]


def test_what_cannot_be_generated_is_refused(model, stats, prompt):
    """Prevents index errors deep in a call of the model."""
    cache, first, _ = started(model, stats, prompt, [CONFIG, UNLIMITED])
    with pytest.raises(CacheError, match="limit is 0"):
        generate(model, cache, first, limit=0)
    with pytest.raises(CacheError, match="each of the 2 rows"):
        generate(model, cache, first[:1], limit=5)
    with pytest.raises(CacheError, match="each of the 2 rows"):
        generate(model, cache, first, limit=5, drafts=[[1]])
    with pytest.raises(CacheError, match="the rows hold"):
        cache.rows.drop_newest([PROMPT + 1, 0])
