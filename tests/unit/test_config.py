"""Settings: defaults, ranges, and the one sentence for each mistake."""

import argparse
import dataclasses

import pytest

from sglang_triattn.config import Config, add_flags, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.rounds.plan import check_reach, first_round, plan_eviction, plan_round
from sglang_triattn.rounds.rules import complete

GOOD = {"enable_triattention": True, "triattention_stats": "s.safetensors"}


def test_defaults():
    """Prevents the documented defaults from drifting."""
    lengths = {"budget": 2048, "interval": 128, "recent": 409, "sinks": 4, "pressure_budget": None}
    choices = {"selection": "per-layer-head", "aggregation": "mean", "budget_scope": "private", "prompt": "frozen"}
    expected = Config("s.safetensors", **lengths, **choices, conversation_ttl=600, value_share=0.8)
    assert complete(read_settings(GOOD)) == complete(expected)
    assert read_settings({"enable_triattention": True}) == Config("auto")
    assert read_settings(GOOD).keeps_inputs
    assert read_settings({}) is None
    assert read_settings({"model_path": "m", "enable_triattention": False}) is None


def test_inputs_of_turns_follow_the_prompt():
    """Prevents inputs that stay where a user lets prompts be compacted, unless both are asked for."""
    for prompt, inputs, keeps in (
        ("frozen", None, True), ("compact", None, False), ("frozen", "compact", False), ("compact", "keep", True),
    ):  # fmt: skip
        given = {"triattention_prompt": prompt, "triattention_turn_inputs": inputs}
        assert read_settings({**GOOD, **given}).keeps_inputs == keeps


def test_recent_follows_the_budgets():
    """Prevents a default from causing a small budget to be refused, or filled by the newest tokens alone."""
    for budget, pressure, recent in ((100, None, 20), (4, None, 1), (1, 1, 1), (100, 41, 20), (100, 20, 10)):
        given = {"triattention_budget": budget, "triattention_pressure_budget": pressure}
        assert complete(read_settings({**GOOD, **given})).recent == recent
    assert read_settings({**GOOD, "triattention_budget": 100, "triattention_recent": 100}).recent == 100
    assert read_settings({**GOOD, "triattention_recent": 0}).recent == 0


def test_values_count_where_each_head_keeps_its_own():
    """Prevents refusing a user who chooses a shared set because of a default."""
    for selection, share in (("shared-mean", 0), ("union", 0), ("per-head", 0), ("per-layer-head", 0.8)):
        assert complete(read_settings({**GOOD, "triattention_selection": selection})).value_share == share
    assert read_settings({**GOOD, "triattention_value_share": 0}).value_share == 0


def test_flags_and_keywords_agree():
    """Prevents a flag that sets another field than the Engine keyword of the same name."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    words = "--enable-triattention --triattention-stats s --triattention-budget 300 --triattention-interval 9"
    words += " --triattention-recent 7 --triattention-selection union --triattention-aggregation max"
    words += " --triattention-budget-scope total --triattention-sinks 2 --triattention-prompt compact"
    words += " --triattention-pressure-budget 50"
    config = read_settings(vars(parser.parse_args(words.split())))
    assert config == Config("s", 300, 9, 7, "union", "max", "total", 2, "compact", 50)
    words += " --triattention-value-share 0.75 --triattention-selection per-layer-head"
    shared = read_settings(vars(parser.parse_args(words.split())))
    assert shared == dataclasses.replace(config, selection="per-layer-head", value_share=0.75)
    assert read_settings(vars(parser.parse_args([]))) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"triattention_budget": 0}, "--triattention-budget is 0"),
        ({"triattention_budget": True}, "--triattention-budget is true"),
        ({"triattention_budget": "2048"}, "'2048'"),
        ({"triattention_interval": 0}, "--triattention-interval is 0"),
        ({"triattention_recent": -1}, "--triattention-recent is -1"),
        ({"triattention_recent": 2049}, "--triattention-recent (2049)"),
        ({"triattention_selection": "best"}, "'best'"),
        ({"triattention_aggregation": "median"}, "'median'"),
        ({"triattention_budget_scope": "all"}, "'all'"),
        ({"triattention_sinks": -1}, "--triattention-sinks is -1"),
        ({"triattention_conversation_ttl": -1}, "whole number of seconds"),
        ({"triattention_sinks": 5000}, "--triattention-sinks (5000) is greater than --triattention-budget (2048)"),
        ({"triattention_prompt": "private"}, "'private'"),
        ({"triattention_turn_inputs": "private"}, "--triattention-turn-inputs is 'private'"),
        ({"triattention_turn_inputs": True}, "supports only keep, compact"),
        ({"triattention_pressure_budget": 0}, "--triattention-pressure-budget is 0"),
        ({"triattention_pressure_budget": 100, "triattention_recent": 128}, "between --triattention-recent (128)"),
        ({"triattention_pressure_budget": 2049}, "and --triattention-budget (2048)"),
        ({"triattention_stats": ""}, "--triattention-stats"),
        ({"triattention_rounds_per_step": -1}, "must be auto or a whole number, at least 0"),
        ({"triattention_rounds_per_step": "some"}, "--triattention-rounds-per-step is 'some'"),
        ({"triattention_conversations": "on"}, "--triattention-conversations is 'on'"),
        ({"triattention_name_fields": "users"}, "--triattention-name-fields has 'users'"),
        ({"triattention_name_fields": "user,"}, "--triattention-name-fields has ''"),
        ({"triattention_name_fields": "metadata"}, "metadata.KEY and headers that begin with X-: use these"),
        ({"triattention_name_fields": "x-"}, "has 'x-'"),
        ({"triattention_name_fields": ["user"]}, "has ['user']"),
        ({"triattention_name_fields": "user", "triattention_conversations": "off"}, "leave one of the two out"),
        ({"triattention_rounds_per_step": True}, "--triattention-rounds-per-step is true"),
        ({"triattention_value_share": -0.1}, "--triattention-value-share is -0.1"),
        ({"triattention_value_share": 1.01}, "number from 0 to 1"),
        ({"triattention_value_share": float("nan")}, "--triattention-value-share is nan"),
        ({"triattention_value_share": True}, "--triattention-value-share is true"),
        ({"triattention_value_share": "half"}, "--triattention-value-share is 'half'"),
        ({"triattention_recency": -0.1}, "--triattention-recency is -0.1, but it must be a number from 0 to 1"),
        ({"triattention_recency": True}, "--triattention-recency is true"),
        ({"triattention_recency": "near"}, "--triattention-recency is 'near'"),
        ({"triattention_recency": 0.25, "triattention_value_share": 0}, "--triattention-value-share is 0"),
        ({"triattention_stats": "look-ups", "triattention_value_share": 0}, "--triattention-stats is look-ups and"),
        ({"triattention_stats": "look-ups", "triattention_selection": "union"}, "--triattention-selection is union"),
        ({"triattention_recency": 0.25, "triattention_selection": "union"}, "--triattention-selection is union"),
        (
            {"triattention_value_share": 0.5, "triattention_selection": "per-head"},
            "add --triattention-selection per-layer-head",
        ),
        ({"triattention_value_share": 1, "triattention_selection": "union"}, "selection is union"),
        ({"triattention_bugdet": 3}, "use triattention_budget, or leave it out."),
        ({"triattention_stats": None, "triattention_prompt": False}, "--triattention-prompt is false"),
        ({"enable_triattention": False}, "no effect"),
        ({"enable_triattention": "yes"}, "'yes'"),
    ],
)
def test_mistakes_get_one_sentence(change, words):
    """Prevents bad settings from being accepted, and messages that do not name the setting."""
    with pytest.raises(TriAttentionError) as caught:
        read_settings({**GOOD, **change})
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("settings", "first"),
    [
        ({}, 4 + 2048 + 128),
        ({"sinks": 0}, 2048 + 128),
        ({"budget": 192, "sinks": 192, "recent": 192}, 192 + 192 + 128),
        ({"budget": 192, "sinks": 64, "budget_scope": "total"}, 192 + 128),
        ({"pressure_budget": 512}, 4 + 512 + 1),
    ],
    ids=str,
)
def test_where_no_request_can_have_a_round(settings, first):
    """Prevents a server that says it is active and never compresses, and refusing one that does."""
    config = complete(Config(**settings))
    assert first_round(config) == first
    check_reach(config, first + 1, "the context limit is")
    with pytest.raises(TriAttentionError) as caught:
        check_reach(config, first, "the context limit is")
    message = str(caught.value)
    assert f"first round at {first} tokens or more (--triattention-budget {config.budget}," in message
    assert f"but the context limit is {first} tokens" in message
    assert message.endswith(".")
    early = config.pressure_budget is not None
    plan = plan_eviction if early else plan_round
    at = {"frozen": config.sinks, "evicted_before": 0, "page_size": 1}
    assert plan(config.under_pressure() if early else config, length=first, **at) is not None
    assert plan(config.under_pressure() if early else config, length=first - 1, **at) is None


def test_a_few_sinks_go_with_any_budget():
    """Prevents the default of one setting from refusing another."""
    assert Config(budget=1).sinks == 4
    assert read_settings({**GOOD, "triattention_budget": 64, "triattention_sinks": 64}).sinks == 64
    # What a request's own budget makes of a server's settings.
    assert dataclasses.replace(Config(sinks=12), budget=9, recent=3).sinks == 12


def test_windows_raise_what_follows_from_the_budget():
    """Prevents a round that drops tokens that window layers still see, and settings of the user that are overruled."""
    config = complete(Config(budget=2048), window=1024, page_size=16)
    assert (config.recent, config.window, config.round_to) == (1024, 1024, 16)
    assert complete(Config(budget=2048, recent=1500), window=1024, page_size=16).recent == 1500
    assert complete(Config(budget=8192), window=512).recent == int(0.2 * 8192)
    with pytest.raises(TriAttentionError, match="sliding window of 4096 tokens"):
        complete(Config(budget=2048), window=4096)
    with pytest.raises(TriAttentionError, match="--triattention-recent is 600"):
        complete(Config(budget=2048, recent=600), window=1024)
    # The number that would be the default is a setting too, once a user gives it.
    with pytest.raises(TriAttentionError, match="--triattention-recent is 409"):
        complete(Config(budget=2048, recent=409), window=1024)


def test_deterministic_inference_leaves_rounds_where_they_are_due():
    """Prevents answers that depend on other requests where the user asked for none that do."""
    assert complete(Config()).most_rounds is None
    assert complete(Config(), level=False).most_rounds == 0
    assert complete(Config(rounds_per_step=0)).most_rounds == 0
    assert complete(Config(rounds_per_step=3)).most_rounds == 3


def test_latents_have_no_values():
    """Prevents tokens that are chosen by the lengths of latents, and a setting of the user that is overruled."""
    assert complete(Config(), latent=True).value_share == 0
    assert complete(Config(value_share=0), latent=True) == complete(Config(), latent=True)
    assert complete(Config(selection="shared-mean"), latent=True).value_share == 0
    with pytest.raises(TriAttentionError, match=r"recency is 0\.5, but this model has latent KV"):
        complete(Config(recency=0.5), latent=True)
    with pytest.raises(TriAttentionError, match="stats is look-ups, but this model has latent KV"):
        complete(Config(stats="look-ups"), latent=True, weighed=True)
    # The number that is the default of other models is a setting too, once a user gives it.
    for share in (0.5, 0.8):
        with pytest.raises(TriAttentionError, match=f"value-share is {share}, but this model has latent KV"):
            complete(Config(value_share=share), latent=True)


@pytest.mark.parametrize("name", ["window", "round_to", "images"])
def test_facts_of_a_model_are_no_settings(name):
    """Prevents a user from setting what only the model decides."""
    with pytest.raises(TriAttentionError, match=f"triattention_{name} is not a setting"):
        read_settings({"enable_triattention": True, f"triattention_{name}": 4})
