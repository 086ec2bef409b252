"""What SGLANG_TRIATTENTION may hold, and how all else is refused."""

from __future__ import annotations

import os
import re

import pytest

from documents import DOCS
from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.variable import VARIABLE, from_environment, read_launch, unset


@pytest.mark.parametrize("text", [None, "", "  "])
def test_nothing_asks_for_nothing(monkeypatch, text):
    """Prevents an empty variable, as a composition leaves it, from counting as settings."""
    monkeypatch.delenv(VARIABLE, raising=False)
    if text is not None:
        monkeypatch.setenv(VARIABLE, text)
    assert from_environment() is None
    assert read_launch({"enable_triattention": True, "triattention_budget": 7}) == Config(budget=7)


def test_it_is_read_like_a_command_line(monkeypatch):
    """Prevents values with spaces, or profiles, from meaning something else than as flags."""
    monkeypatch.setenv(
        VARIABLE, "--enable-triattention --triattention-stats 'my file' --triattention-profile=aggressive"
    )
    asked = from_environment()
    assert asked is not None
    assert (asked.stats, asked.profile, asked.budget) == ("my file", "aggressive", 1024)
    assert read_launch({"model_path": "m", "triattention_budget": None}) == asked


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("--triattention-budget 7", f"In the environment variable {VARIABLE}, --triattention-budget has no effect"),
        ("--enable-triattention --triattention-budget 0", f"In the environment variable {VARIABLE}, --triattention-bu"),
        ("--enable-triattention --triattention-budget x", "invalid int value: 'x'"),
        ("--enable-triattention --triattention-budget", "expected one argument"),
        (
            "--enable-triattention --triattention-budgte=7",
            "--triattention-budgte, which is not a flag of sglang-triatt",
        ),
        ("--enable-triattention --triattention-bud 7", "use --triattention-budget, or leave it out."),
        ("--enable-triattention --tp-size 2", "holds --tp-size, which is not a flag of sglang-triattn"),
        ("1", "holds 1, which is not a flag of sglang-triattn"),
        ("--enable-triattention --triattention-stats 'a", "cannot be split into words (No closing quotation)"),
    ],
)
def test_all_else_is_refused_in_one_sentence(monkeypatch, capsys, text, words):
    """Prevents a usage message of argparse, an exit, or settings that are dropped in silence."""
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(TriAttentionError) as caught:
        from_environment()
    sentence = str(caught.value)
    assert words in sentence
    assert VARIABLE in sentence
    assert "\n" not in sentence
    assert sentence.endswith(".")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("given", [{"triattention_budget": 7}, {"enable_triattention": False}])
def test_two_sources_are_refused(monkeypatch, given):
    """Prevents one of two sources of settings from winning unseen."""
    monkeypatch.setenv(VARIABLE, "--enable-triattention")
    with pytest.raises(TriAttentionError) as caught:
        read_launch(given)
    (name,) = given
    assert "--" + name.replace("_", "-") in str(caught.value)
    assert VARIABLE in str(caught.value)


def test_it_can_be_taken_out_for_a_time(monkeypatch):
    """Prevents `calibrate --engine sglang` from being taken for a launch that asks for compression."""
    monkeypatch.setenv(VARIABLE, "--enable-triattention")

    @unset()
    def tool() -> bool:
        return VARIABLE in os.environ

    assert not tool()
    assert os.environ[VARIABLE] == "--enable-triattention"


def test_the_example_of_the_documents(monkeypatch):
    """Prevents an example that users copy from being refused."""
    (text,) = re.findall(rf'^    {VARIABLE}="(.*)"$', (DOCS / "configuration.md").read_text(), re.MULTILINE)
    monkeypatch.setenv(VARIABLE, text)
    assert from_environment() == Config(budget=4096)
