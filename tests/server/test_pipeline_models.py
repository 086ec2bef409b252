"""Models whose layers differ in what they keep, in two pipeline stages; `test_pipeline` has a Llama."""

from __future__ import annotations

import pytest

from families import WINDOW
from family_servers import WITH_BUFFER, WITHOUT_BUFFER, hold_to_account, prepared, selecting, started, under_flags
from harness import STAGES, TWO_GROUPS, two_cores
from server import ServerError
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm


@pytest.mark.parametrize(
    ("family", "page_size", "selection", "scored", "flags"),
    [
        wide("gpt-oss", 16, "per-layer-head", (1, 1), ()),
        wide("gpt-oss", 1, "shared-mean", (1, 1), ()),
        wide("nemotron-h", 1, "shared-mean", (1, 1), WITHOUT_BUFFER),
        wide("nemotron-h", 16, "shared-mean", (1, 1), WITH_BUFFER),
        wide("qwen3.5", 16, "union", (1, 1), WITH_BUFFER),
        wide("kimi-linear", 16, "per-layer-head", (1, 1), WITH_BUFFER),
        wide("qwen3-moe-all", 1, "shared-mean", (2, 2), TWO_GROUPS),
    ],
)
def test_logits(serve, tmp_path, family, page_size, selection, scored, flags):
    """Prevents a stage from looking for K/V of its layers under another stage's numbers, rounds that take a window or a
    state of one stage for that of another, and stages that disagree on what is freed."""
    tiny, account = prepared(tmp_path, family)
    account = under_flags(account, page_size, selection, flags)
    account.stages = scored
    flags = (*selecting(page_size, selection), *STAGES, *flags)
    client = started(serve, tiny, family, *flags, env=two_cores(ranks=4 if TWO_GROUPS[0] in flags else 2))
    hold_to_account(client, account, page_size)
    serve.stop(client)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("gpt-oss", ("--swa-full-tokens-ratio", "0.8")),
        ("nemotron-h", WITH_BUFFER),
        ("llama", ("--enable-mixed-chunk", "--enable-hierarchical-cache", "--hicache-ratio", "4")),
        ("llama", ("--enable-mixed-chunk", "--enable-dynamic-chunking")),
    ],
)
def test_storm(serve, tmp_path, family, flags):
    """Prevents leaks of slots, of either pool, or of states in a stage, and stages that wait for one another, where
    requests are aborted, retracted and compacted while they are prefilled."""
    tiny, account = prepared(tmp_path, family)
    flags = (*STAGES, "--page-size", "16", "--max-total-tokens", "2048", *FLAGS, *flags)
    env = {**two_cores(), **RETRACTING, "SGLANG_SWA_EVICTION_INTERVAL": "16"}
    client = started(serve, tiny, family, *flags, env=env)
    _, finished = storm(client, 1, 30, (WINDOW + 1, account.budget), 1500)
    assert_withstood(client, finished, 30)
    serve.stop(client)


@pytest.mark.wide
def test_a_stage_without_a_layer_to_score(serve, tmp_path):
    """Prevents stages that wait for one which cannot be compressed, and a sentence that blames the whole model."""
    tiny, _ = prepared(tmp_path, "gpt-oss")
    with pytest.raises(ServerError, match="because one of its pipeline stages has no layer that attends to all tokens"):
        started(serve, tiny, "gpt-oss", *STAGES, env={**two_cores(), "SGLANG_PP_LAYER_PARTITION": "1,3"})
