"""Models that differ from a Llama in their attention, layers or cache: what one server of each measures, answers and
keeps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from families import WINDOW
from family_servers import (
    WITH_BUFFER,
    WITHOUT_BUFFER,
    compare_with_account,
    hold_to_account,
    prepared,
    selecting,
    started,
    under_flags,
)
from harness import KEYS_ALONE, REFERENCE
from measured_statistics import MEASURED, assert_measured_right, measuring
from oracle import means_of
from plain_answers import assert_plain_answers
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm

# Tokens of a prompt that are prefilled at once: whole pages, and a window of the measured text.
CHUNK = 320
# Window layers of these have a KV pool of their own.
POOLS = ("gpt-oss", "mimo-v2", "step-3.5", "gemma-4", "gemma-4-shared", "mellum", "laguna")


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        flags: of the server, in addition.
        measured: whether it measures its statistics at launch, if transformers can check them; else they are random.
        plain: whether its answers without compression are held to those of transformers.
    """

    family: str
    page_size: int
    selection: str
    flags: tuple[str, ...] = ()
    measured: bool = True
    plain: bool = False

    def __str__(self) -> str:
        return f"{self.family}-{self.page_size}-{self.selection}"


CASES = [
    wide(Case("llama", 1, "union", plain=True)),
    Case("gemma2", 16, "shared-mean", plain=True),
    wide(Case("gemma3", 1, "union", plain=True)),
    wide(Case("olmo3", 64, "per-head")),
    wide(Case("exaone4", 16, "per-layer-head")),
    wide(Case("cohere2", 1, "per-layer-head")),
    wide(Case("smollm3", 16, "per-layer-head")),
    wide(Case("seed-oss", 16, "per-layer-head")),
    Case("hunyuan", 16, "per-layer-head", plain=True),
    wide(Case("dots1", 1, "shared-mean")),
    wide(Case("nemotron-nas", 16, "per-layer-head")),
    wide(Case("gpt-oss", 1, "shared-mean", measured=False, plain=True)),
    Case("gpt-oss", 16, "per-layer-head", plain=True),
    wide(Case("mimo-v2", 16, "per-layer-head")),
    wide(Case("step-3.5", 64, "per-layer-head")),
    wide(Case("mellum", 16, "per-layer-head", plain=True)),
    wide(Case("laguna", 16, "per-layer-head")),
    wide(Case("gemma-4", 16, "per-layer-head")),
    wide(Case("gemma-4-shared", 1, "per-layer-head")),
    Case("deepseek-v3", 16, "per-layer-head", plain=True),
    wide(Case("glm-4.7-flash", 64, "per-layer-head")),
    wide(Case("kimi-linear", 16, "per-layer-head", WITH_BUFFER, plain=True)),
    Case("qwen3-next", 1, "union", WITHOUT_BUFFER, plain=True),
    wide(Case("qwen3-next", 16, "per-layer-head", WITH_BUFFER, measured=False)),
    wide(Case("qwen3.5", 16, "union", WITH_BUFFER, plain=True)),
    wide(Case("qwen3.5-whole", 1, "shared-mean", WITH_BUFFER)),
    wide(Case("lfm2", 1, "per-layer-head", plain=True)),
    wide(Case("falcon-h1", 16, "per-layer-head", (*WITH_BUFFER, *KEYS_ALONE), plain=True)),
    wide(Case("granite-4-h", 1, "per-layer-head", WITH_BUFFER, plain=True)),
    wide(Case("nemotron-h", 16, "shared-mean", WITH_BUFFER, plain=True)),
]
OTHERS = [
    ("gemma3", 1, "per-layer-head"),
    ("gemma3", 16, "shared-mean"),
    ("gemma2", 16, "per-layer-head"),
    ("gemma2", 1, "shared-mean"),
    ("olmo3", 1, "union"),
    ("cohere2", 1, "shared-mean"),
    ("gpt-oss", 1, "per-layer-head"),
    ("gpt-oss", 16, "shared-mean"),
    ("gpt-oss", 64, "per-layer-head"),
    ("mimo-v2", 1, "shared-mean"),
    ("mimo-v2", 64, "per-layer-head"),
    ("step-3.5", 1, "shared-mean"),
    ("step-3.5", 16, "per-layer-head"),
    ("gemma-4", 1, "shared-mean"),
    ("gemma-4", 64, "per-layer-head"),
    ("gemma-4-shared", 16, "shared-mean"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_family(serve, tmp_path, case):
    """Prevents three kinds of wrong answers from one family's server.

    What it measures at launch: layers other than those that are scored, queries turned back that were never turned, or
    by wrong frequencies or positions, statistics of one layer alone where others read its keys, and other ones from
    queries that meet latents than from those that meet expanded keys.

    What it answers without compression: wrong windows, slots, sinks, caps and latents, in prefill by chunks, after a
    cached prefix, in decode and in batches, and a platform that leaves such a model to a backend that cannot serve it.

    What it keeps: window layers that see tokens across a gap that a round has made, others than the newest, or slots of
    the other pool; their keys scored, or K/V moved that they still read; states that a round changes or that see a
    token twice.
    """
    family, page_size, flags = case.family, case.page_size, case.flags
    tiny, account = prepared(tmp_path, family)
    account = under_flags(account, page_size, case.selection, flags)
    flags = (*selecting(page_size, case.selection), "--chunked-prefill-size", str(CHUNK), *flags)
    measured, env = case.measured and family in MEASURED, None
    if measured:
        flags = (*flags, "--triattention-stats", "auto")
        env = measuring(tmp_path, absorbs=family == "glm-4.7-flash")
    client = started(serve, tiny, family, *flags, env=env)
    assert client.setting("attention_backend") == REFERENCE
    if measured:
        account = replace(account, **means_of(assert_measured_right(client, tiny, account, family, tmp_path)))
    if case.plain:
        assert_plain_answers(client, tiny, family, CHUNK)
    assert_freed(family, hold_to_account(client, account, page_size))
    serve.stop(client)


@pytest.mark.parametrize(("family", "page_size"), [wide("qwen3-moe", 1), wide("glm-4.5", 16)])
def test_a_server_that_does_not_compress(serve, tmp_path, family, page_size):
    """Prevents wrong answers of plain SGLang through the CPU platform's backend, here by models in which rounding
    decides which experts a token takes, and with them what an account of kept tokens would compute."""
    tiny, _ = prepared(tmp_path, family)
    flags = ("--page-size", str(page_size), "--chunked-prefill-size", str(CHUNK))
    client = started(serve, tiny, family, *flags, compressed=False)
    assert client.setting("attention_backend") == REFERENCE
    assert_plain_answers(client, tiny, family, CHUNK)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(("family", "page_size", "selection"), OTHERS)
def test_another_page_size_or_selection(serve, tmp_path, family, page_size, selection):
    """Prevents what `test_a_family` does of kept tokens, where a page size and a selection meet in one family that
    meet in others there."""
    assert_freed(family, compare_with_account(serve, tmp_path, family, page_size, selection))


def assert_freed(family: str, reports: list[dict[str, int]]) -> None:
    """Rounds of models with a second pool free a slot of the first for each token that they evict."""
    if family in POOLS:
        for report in reports:
            assert report["freed_slots"] == report["evicted_tokens"] > 0


@pytest.mark.wide
def test_storm_on_a_model_with_windows(serve, tmp_path):
    """Prevents leaks and hangs where rounds must evict whole pages, and a conversation's next turn out of order."""
    tiny, account = prepared(tmp_path, "gemma3")
    client = started(serve, tiny, "gemma3", "--page-size", "16", "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 1, 40, (WINDOW, account.budget), 1500, conversations=6)
    assert_withstood(client, finished, 40)
    serve.stop(client)
