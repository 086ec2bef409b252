"""Profiles: what they set, and what wins over them."""

import argparse
import dataclasses

import pytest
import yaml
from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

from documents import DOCS, code, table
from sglang_triattn.config import Config, add_flags, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.profiles import PROFILES
from sglang_triattn.rounds.rules import RoundRules, complete

MEASURED = {"interval": 128, "selection": "per-layer-head", "value_share": 0.8}
"""What every measurement for a profile had, with a fifth of newest tokens; see docs/quality.md."""


def settings(**given: object) -> Config:
    config = read_settings({"enable_triattention": True, **{f"triattention_{name}": v for name, v in given.items()}})
    assert config is not None
    return config


@pytest.mark.parametrize(
    ("name", "budget", "recent", "least"),
    [("conservative", 4096, 819, 0.5), ("balanced", 2048, 409, 0), ("aggressive", 1024, 204, 0)],
)
def test_a_profile_is_what_was_measured(name, budget, recent, least):
    """Prevents a default that changes and takes a profile along, away from its measurements."""
    found = dataclasses.asdict(complete(settings(profile=name)))
    assert found["profile"] == name
    assert {key: found[key] for key in ("budget", "recent", "keep_share", *MEASURED)} == {
        "budget": budget,
        "recent": recent,
        "keep_share": least,
        **MEASURED,
    }


def test_without_a_profile_nothing_changes():
    """Prevents a profile that is chosen for users who did not ask, and a claim about the defaults that is not true."""
    assert settings() == Config()
    assert settings().profile is None
    assert settings(profile="balanced") == dataclasses.replace(Config(), profile="balanced")


def test_what_is_given_wins():
    """Prevents a flag that looks like a default from being overruled, and values left over from the profile."""
    assert settings(profile="aggressive", budget=2048).budget == 2048
    assert complete(settings(profile="aggressive", budget=2048)).recent == 409
    assert complete(settings(profile="aggressive", recent=0)).recent == 0
    assert settings(profile="conservative", budget=None).budget == 4096
    assert settings(profile="conservative", keep_share=0).keep_share == 0
    shared = complete(settings(profile="conservative", selection="union"))
    assert (shared.budget, shared.selection, shared.value_share) == (4096, "union", 0)


@pytest.mark.parametrize("name", ["best", "", 3, ["balanced"]])
def test_an_unknown_profile_gets_one_sentence(name):
    """Prevents a typing error from serving with the defaults."""
    with pytest.raises(
        TriAttentionError, match=r"the profiles are conservative, balanced, aggressive: .*\.$"
    ) as caught:
        settings(profile=name)
    assert "\n" not in str(caught.value)


def test_a_profile_alone_compresses_nothing():
    """Prevents a server that runs dense although its flags say how to compress."""
    with pytest.raises(TriAttentionError, match="--triattention-profile has no effect without"):
        read_settings({"triattention_profile": "balanced"})


def test_config_file_and_command_line(tmp_path):
    """Prevents a profile of the YAML file from overruling flags, in the file or on the command line."""
    parser = argparse.ArgumentParser()
    add_flags(parser)
    file = tmp_path / "server.yaml"
    values = {"enable-triattention": True, "triattention-profile": "aggressive", "triattention-interval": 64}
    file.write_text(yaml.safe_dump(values))

    def read(*words: str) -> RoundRules:
        merged = ConfigArgumentMerger(parser).merge_config_with_args(["--config", str(file), *words])
        config = read_settings(vars(parser.parse_args(merged)))
        assert config is not None
        return complete(config)

    config = read()
    assert (config.profile, config.budget, config.interval) == ("aggressive", 1024, 64)
    config = read("--triattention-budget", "2048")
    assert (config.profile, config.budget, config.recent, config.interval) == ("aggressive", 2048, 409, 64)
    assert read("--triattention-profile", "conservative").budget == 4096


def test_check_and_plan_know_it(run_check, run_plan):
    """Prevents an answer about other settings than the server's."""
    _, output, _ = run_check("qwen3-32b", "--triattention-profile", "aggressive")
    assert "profile      aggressive\n" in output
    assert "budget 1,024, interval 128, newest 204 kept" in output
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config |= {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 8192}
    config |= {"architectures": ["LlamaForCausalLM"]}
    for words, shown in (
        (("--profile", "conservative"), "conservative: budget 4,096 (private), or 50% of the private tokens, interval"),
        (("--profile", "conservative", "--keep-share", "0"), "conservative: budget 4,096 (private), interval 128"),
        (("--triattention-profile", "aggressive", "--budget", "2048"), "aggressive: budget 2,048 (private)"),
        ((), "compression  budget 2,048 (private), interval 128"),
    ):
        status, output, error = run_plan(config, "--weights", "1G", *words)
        assert status == 0, error
        assert shown in output
    status, _, error = run_plan(config, "--weights", "1G", "--profile", "best")
    assert status == 2
    assert "--triattention-profile is 'best'" in error


def test_the_documents_show_them():
    """Prevents a table of other values than those that a profile sets."""
    rows = table(DOCS / "configuration.md", "Profiles", "profile")
    shown = {code(row[0])[0]: tuple(int(cell.replace(",", "")) for cell in row[1:4]) for row in rows}
    found = {name: complete(settings(profile=name)) for name in PROFILES}
    assert shown == {name: (c.budget, c.recent, c.trigger(0)) for name, c in found.items()}
    shares = {code(row[0])[0]: row[5] for row in rows}
    assert shares == {name: "a half" if c.keep_share == 0.5 else "less and less" for name, c in found.items()}
