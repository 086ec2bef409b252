"""The cache for transformers, compared with the server tests' independent oracle."""

import dataclasses

import pytest
import torch

from cache_cases import CONFIG, PROMPT, TOKENS, UNLIMITED, Newest, make_cache
from documents import DOCS, example
from oracle import Oracle, oracle_of
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.rounds.plan import max_kv_tokens
from sglang_triattn.rounds.rules import complete
from sglang_triattn.stats.file import StatsError, load_stats
from sglang_triattn.transformers_cache.feed import compute_dense, feed, forward, replay
from sglang_triattn.transformers_cache.policy import CacheError, Setting
from tiny_model import VOCABULARY, build_tiny_model

ALL = [dataclasses.replace(CONFIG, selection=selection, value_share=0) for selection in SELECTIONS]
BY_VALUES = [dataclasses.replace(CONFIG, value_share=share) for share in (0.75, 1.0)]


class Anything:
    """Keeps different tokens in every head of every layer."""

    def __init__(self, pools):
        self.sets = (len(pools.k_buffers), pools.k_buffers[0].shape[1])
        self.random = torch.Generator().manual_seed(3)

    def keep(self, slots, lengths, next_positions, keep, recent):
        order = torch.rand(1, *self.sets, slots.shape[1], generator=self.random)
        return order.argsort(-1)[..., :keep].sort(-1).values


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
def ids():
    return torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(7))


def kept_of(cache):
    """Row -> the positions that its heads hold after each round, from here on."""
    kept = {}
    cache.rows.after_round = lambda row, plan: kept.setdefault(row, []).append(cache.rows.positions_of(row))
    return kept


def tensors_of(cache):
    return [tensor.clone() for tensor in cache.rows.pools.all()]


@pytest.mark.parametrize("config", [*ALL, *BY_VALUES], ids=[*SELECTIONS, "values-and-scores", "values"])
def test_logits_equal_a_masked_forward_pass(model, stats, tiny, ids, config):
    """Prevents rounds at other steps, kept sets, masks or positions than in an account without our code."""
    cache = make_cache(
        model, [config], stats, capacity=max_kv_tokens(complete(config), frozen=PROMPT, logical_end=TOKENS)
    )
    logits = torch.cat([feed(model, cache, ids[:PROMPT]), feed(model, cache, ids[PROMPT:], logits=TOKENS - PROMPT)], 1)
    settings = {"selection": config.selection, "value_share": config.value_share}
    oracle = Oracle(**{**vars(oracle_of(tiny)), **settings})
    expected, rounds = oracle.logprobs(ids.tolist(), PROMPT, PROMPT)
    assert cache.rows.report(0).rounds == rounds >= 5
    assert (logits[0].log_softmax(-1) - expected).abs().max() < 1e-4


@pytest.mark.parametrize("early", [1, 15])
def test_a_first_round_that_comes_early(model, stats, tiny, ids, early):
    """Prevents an early first round from keeping another budget, and later ones from coming early as well."""
    cache = make_cache(model, [Setting(CONFIG, early=early)], stats)
    kept = kept_of(cache)
    logits = torch.cat([feed(model, cache, ids[:PROMPT]), feed(model, cache, ids[PROMPT:], logits=TOKENS - PROMPT)], 1)
    expected, rounds = oracle_of(tiny).logprobs(ids.tolist(), PROMPT, PROMPT, early=early)
    assert len(kept[0]) == rounds >= 5
    assert (logits[0].log_softmax(-1) - expected).abs().max() < 1e-4


def test_a_prompt_that_is_compacted(model, stats, tiny, ids):
    """Prevents rounds between other chunks of a prompt than the server's, and a round right after the prompt."""
    config = dataclasses.replace(CONFIG, prompt="compact")
    cache = make_cache(model, [config], stats, prompt_length=200)
    kept = kept_of(cache)
    logits = feed(model, cache, ids[:200], chunk=48)
    logits = torch.cat([logits, feed(model, cache, ids[200:], logits=100)], 1)
    expected, rounds = oracle_of(tiny).logprobs(ids.tolist(), 200, CONFIG.sinks, chunk=48)
    assert len(kept[0]) == rounds >= 5
    assert (logits[0].log_softmax(-1) - expected).abs().max() < 1e-4


def test_settings_side_by_side(model, stats, ids):
    """Prevents one row's lengths, rounds or K/V from leaking into another's."""
    settings = [
        *ALL,
        UNLIMITED,
        dataclasses.replace(CONFIG, budget=100, interval=9),
        Setting(CONFIG, lambda pools: Newest()),
        Setting(dataclasses.replace(CONFIG, budget_scope="total"), Anything),
    ]
    together = make_cache(model, settings, stats)
    kept = kept_of(together)
    logits = feed(model, together, ids, logits=20)
    for row, setting in enumerate(settings):
        alone = make_cache(model, [setting], stats)
        own = kept_of(alone)
        assert (feed(model, alone, ids, logits=20)[0] - logits[row]).abs().max() < 1e-4
        assert together.rows.report(row) == alone.rows.report(0)
        assert len(own.get(0, [])) == len(kept.get(row, []))
        for mine, theirs in zip(own.get(0, []), kept.get(row, []), strict=True):
            assert torch.equal(mine, theirs)
    assert together.rows.report(4).rounds == 0
    assert len({together.rows.report(row).rounds for row in range(len(settings))}) > 2


def test_positions_follow_what_heads_hold(model, ids):
    """Prevents K, V and the positions recorded for them from being moved in different ways."""
    cache = make_cache(model, [Setting(CONFIG, Anything), Setting(CONFIG, lambda pools: Newest())])
    feed(model, cache, ids)
    dense = compute_dense(model, ids)
    # The first layer's keys and values depend only on their token and position.
    for buffers, whole in (("k_buffers", dense.layers[0].keys), ("v_buffers", dense.layers[0].values)):
        for row in (0, 1):
            length = cache.rows.lengths[row]
            held = getattr(cache.rows.pools, buffers)[0].unflatten(0, (2, -1))[row, :length]
            for head in (0, 1):
                expected = whole[0, head, cache.rows.positions_of(row)[0, head]]
                assert (held[:, head] - expected).abs().max() < 1e-5
    positions = cache.rows.positions_of(0)
    assert bool((positions.diff(dim=-1) > 0).all())
    assert not torch.equal(positions[0, 0], positions[2, 1])
    length = cache.rows.lengths[1]
    newest = torch.cat([torch.arange(PROMPT), torch.arange(TOKENS - length + PROMPT, TOKENS)])
    assert torch.equal(cache.rows.positions_of(1), newest.expand(3, 2, -1))


def test_a_branch_leaves_the_original_alone(model, stats, ids):
    """Prevents a question from changing what later tokens or other questions see."""
    cache = make_cache(model, ALL, stats)
    feed(model, cache, ids[:200])
    before, lengths = tensors_of(cache), list(cache.rows.lengths)
    questions = cache.branch([2, 2, 0], room=5)
    asked = forward(model, questions, ids[200:205], logits=5)
    feed(model, cache.branch(), ids[200:])
    assert all(map(torch.equal, before, tensors_of(cache)))
    assert cache.rows.lengths == lengths
    with pytest.raises(CacheError, match=r"cannot take 1 more.*capacity"):
        forward(model, questions, ids[205:206])
    answered = forward(model, cache, ids[200:205], logits=5)
    assert (asked - answered[[2, 2, 0]]).abs().max() < 1e-4


def test_a_branch_goes_on_as_the_original_would(model, stats, ids):
    """Prevents a branch from forgetting rounds, and with them positions and the step of the next round."""
    cache = make_cache(model, ALL, stats)
    feed(model, cache, ids[:200])
    other = cache.branch([1, 3])
    kept, again = kept_of(cache), kept_of(other)
    feed(model, cache, ids[200:])
    feed(model, other, ids[200:])
    for row, place in ((1, 0), (3, 1)):
        assert cache.rows.report(row) == other.rows.report(place)
        assert all(map(torch.equal, kept[row], again[place]))


def test_questions_of_different_lengths(model, stats, ids):
    """Prevents padding from being seen, or from staying in the row."""
    cache = make_cache(model, ALL[:2], stats)
    feed(model, cache, ids[:200])
    batch = torch.zeros(2, 6, dtype=torch.int64)
    batch[0, :2], batch[1] = ids[200:202], ids[210:216]
    both = cache.branch()
    first = forward(model, both, batch, counts=[2, 6], logits=6)
    then = forward(model, both, ids[:1])
    for row, question in enumerate((ids[200:202], ids[210:216])):
        alone = cache.branch([row])
        assert (forward(model, alone, question)[0, 0] - first[row, len(question) - 1]).abs().max() < 1e-4
        assert (forward(model, alone, ids[:1])[0] - then[row]).abs().max() < 1e-4


def test_replay_decides_as_feed_until_the_first_round(model, stats, ids):
    """Prevents the fast mode from running rounds at other steps, or differing for another reason than it states."""
    settings = [*ALL, dataclasses.replace(CONFIG, prompt="compact")]
    fed, replayed = make_cache(model, settings, stats), make_cache(model, settings, stats)
    kept, again = kept_of(fed), kept_of(replayed)
    feed(model, fed, ids)
    dense = compute_dense(model, ids, chunk=64)
    for until in (10, 180, None):
        replay(replayed, dense, until)
    assert [fed.rows.report(row) for row in range(5)] == [replayed.rows.report(row) for row in range(5)]
    for row in range(5):
        assert torch.equal(kept[row][0], again[row][0])
    differ = [
        not torch.equal(mine, theirs) for row in range(5) for mine, theirs in zip(kept[row], again[row], strict=True)
    ]
    assert any(differ)
    # After any evictions, K and V are those of the dense pass.
    last = replayed.rows.pools.v_buffers[2].unflatten(0, (5, -1))[3, : replayed.rows.lengths[3], 1]
    assert torch.equal(last, dense.layers[2].values[0, 1, replayed.rows.positions_of(3)[2, 1]])


class Wrong:
    """A policy that breaks the rules."""

    def __init__(self, kept):
        self.kept = kept

    def keep(self, slots, lengths, next_positions, keep, recent):
        return self.kept(keep)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (lambda keep: torch.arange(keep - 1)[None], "of one of the shapes"),
        (lambda keep: torch.arange(keep).int()[None], "int64"),
        (lambda keep: torch.arange(keep).flip(0)[None], "do not ascend"),
        (lambda keep: torch.arange(keep)[None] + 33, "do not ascend within its 96"),
    ],
)
def test_a_policy_that_breaks_the_rules(model, ids, kept, message):
    """Prevents a benchmark's faulty control from moving K/V to where it does not belong."""
    cache = make_cache(model, [Setting(CONFIG, lambda pools: Wrong(kept))])
    with pytest.raises(CacheError, match=message):
        feed(model, cache, ids)


def test_refusals(model, stats, tiny, ids, tmp_path):
    """Prevents silent wrong answers when an argument cannot work."""
    for changes, message in (
        ({"settings": []}, "settings is empty"),
        ({"stats": None}, "give the model's statistics"),
        ({"capacity": 0}, "capacity is 0"),
        ({"prompt_length": 0}, "prompt_length is 0"),
        ({"settings": [Setting(CONFIG, early=-1)]}, "early is -1"),
        ({"settings": [Setting(CONFIG, early=CONFIG.interval)]}, "must lie between 0 and"),
        ({"protected": 51}, "the prompt has only 50"),
        ({"stats": dataclasses.replace(stats, head_dim=64)}, "head_dim is 64 there and 32"),
    ):
        arguments = {"settings": [CONFIG], "stats": stats, **changes}
        with pytest.raises((CacheError, StatsError), match=message):
            make_cache(model, **arguments)
    cache = make_cache(model, [CONFIG], stats)
    for call, message in (
        (lambda: forward(model, cache, []), "n at least 1"),
        (lambda: forward(model, cache, [[1], [2]]), r"must be \[n\] or \[1, n\]"),
        (lambda: forward(model, cache, [1, 2], logits=3), "between 0 and the 2"),
        (lambda: forward(model, cache, [1, 2], counts=[3]), "numbers from 0 to 2"),
        (lambda: feed(model, cache, [1, 2], chunk=0), "chunk is 0"),
        (lambda: cache.branch([1]), "some of the 1 rows"),
        (lambda: replay(cache, compute_dense(model, [1, 2]), 3), "to 3 of the 2"),
        (lambda: model(input_ids=ids[None], past_key_values=cache), "give each call of the model what `inputs`"),
        (cache.reset, "cannot be reset"),
    ):
        with pytest.raises(CacheError, match=message):
            call()
    assert cache.rows.lengths == [0]


def test_the_example_in_the_docs(tiny, ids, tmp_path, monkeypatch, capsys):
    """Prevents an example that does not run."""
    source = example(DOCS / "transformers.md", "A cache for transformers, without a server", "python")
    (tmp_path / "M").symlink_to(tiny.path)
    (tmp_path / "M.safetensors").symlink_to(tiny.stats)
    monkeypatch.chdir(tmp_path)
    found = {"ids": ids.repeat(3), "question": ids[:5]}
    exec(compile(source, "transformers.md", "exec"), found)
    assert found["logits"].shape == (3, 1, VOCABULARY)
    assert "rounds=2" in capsys.readouterr().out
    assert found["cache"].rows.report(2).rounds == 0
