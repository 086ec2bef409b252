"""Positions, kept sets and attention of a compressed request against an account that shares no code with it."""

from __future__ import annotations

import pytest
import torch

from harness import BUDGET, INTERVAL, compression, prompt, served_logprobs, two_cores
from oracle import TOLERANCE, Oracle, oracle_of
from sets import wide
from tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def oracle(tiny):
    return oracle_of(tiny)


@pytest.mark.parametrize("page_size", [1, wide(16)])
def test_logits_equal_a_masked_forward_pass(serve, oracle, page_size):
    """Prevents wrong positions after a round, a wrong kept set, and K/V lost or mixed up by compaction."""
    ids = prompt(5, 50)
    response = serve("--page-size", str(page_size)).generate(ids, 400, logprobs=True)
    report = compression(response)
    assert report["rounds"] >= 8
    frozen = len(ids) - len(ids) % page_size
    assert report["frozen_length"] == frozen

    output = response["output_ids"]
    expected, rounds = oracle.logprobs(ids + output[:-1], len(ids), frozen)
    assert rounds == report["rounds"]
    values, tokens = served_logprobs(response)
    error = (expected.gather(1, tokens) - values).abs().max()
    assert error < TOLERANCE
    # The same comparison must fail for a server that never evicts, or this test would prove nothing.
    dense = Oracle(**{**vars(oracle), "budget": 10_000})
    unmasked, _ = dense.logprobs(ids + output[:-1], len(ids), frozen)
    assert (unmasked.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE


@pytest.mark.parametrize("overlap", [True, wide(False, id="in turn")])
def test_an_answer_that_ends_in_the_step_of_a_round(serve, oracle, overlap):
    """Prevents an account that misses the round of a step which was queued before the answer had ended."""
    client = serve("--page-size", "1", *(() if overlap else ("--disable-overlap-schedule",)))
    ids = prompt(5, 50)
    for tokens in (BUDGET + INTERVAL, BUDGET + INTERVAL + 1):
        response = client.generate(ids, tokens)
        account = Oracle(**{**vars(oracle), "overlap": overlap})
        _, rounds = account.logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
        assert compression(response)["rounds"] == rounds == (overlap and tokens > BUDGET + INTERVAL)
        client.flush()


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        (["--triattention-aggregation", "max", "--triattention-budget-scope", "total"],
         {"aggregation": "max", "total": True}),
        wide(["--triattention-value-share", "0"], {"value_share": 0.0}),
        (["--triattention-value-share", "0.4", "--page-size", "16"], {"value_share": 0.4}),
        (["--triattention-recency", "0.5", "--page-size", "1"], {"recency": 0.5}),
        wide(["--triattention-recency", "1", "--page-size", "16"], {"recency": 1.0}),
        wide(["--triattention-selection", "shared-mean"], {"selection": "shared-mean"}),
        (["--triattention-keep-share", "0.5", "--triattention-budget", "32", "--triattention-interval", "8",
          "--triattention-recent", "8", "--page-size", "16"],
         {"keep_share": 0.5, "budget": 32, "interval": 8, "recent": 8}),
    ],
    ids=["max-total", "scores alone", "fewer-values-pages", "recency", "recency-pages", "shared-mean",
         "share"],
)  # fmt: skip
def test_logits_with_other_settings(serve, oracle, flags, settings):
    """Prevents a setting that is accepted and ignored, or that changes more than it says."""
    ids = prompt(9, 40)
    response = serve(*flags).generate(ids, 240, logprobs=True)
    frozen = compression(response)["frozen_length"]
    everything = ids + response["output_ids"][:-1]
    expected, rounds = Oracle(**{**vars(oracle), **settings}).logprobs(everything, len(ids), frozen)
    assert compression(response)["rounds"] == rounds >= 5
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    default, _ = oracle.logprobs(everything, len(ids), frozen)
    assert (default.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE


@pytest.mark.parametrize(
    ("page_size", "recent", "by_flag"), [wide(1, 40, False), wide(16, 48, False), wide(16, 40, True)], ids=str
)
def test_logits_with_more_recent_tokens_than_come_between_rounds(serve, oracle, page_size, recent, by_flag):
    """Prevents a round from taking older tokens for the newest, rows from being closed up in the wrong place, and a
    request that asks for more of them than the server does from getting the server's."""
    ids = prompt(17, 50)
    flags = ("--triattention-recent", str(recent)) if by_flag else ()
    asked = {} if by_flag else {"custom_params": {"triattention": {"recent": recent}}}
    response = serve("--page-size", str(page_size), *flags).generate(ids, 240, logprobs=True, **asked)
    everything, frozen = ids + response["output_ids"][:-1], compression(response)["frozen_length"]
    expected, rounds = Oracle(**{**vars(oracle), "recent": recent}).logprobs(everything, len(ids), frozen)
    assert compression(response)["rounds"] == rounds >= 5
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    fewer, _ = oracle.logprobs(everything, len(ids), frozen)
    assert (fewer.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE


def test_logits_with_keys_of_eight_bits(serve, oracle):
    """Prevents 8-bit keys from being scored as other numbers, and their bytes from being converted when they move."""
    ids = prompt(11, 40)
    response = serve("--kv-cache-dtype", "fp8_e5m2", "--page-size", "16").generate(ids, 200, logprobs=True)
    everything, frozen = ids + response["output_ids"][:-1], compression(response)["frozen_length"]
    values, tokens = served_logprobs(response)
    rounded = Oracle(**{**vars(oracle), "stored": torch.float8_e5m2})
    expected, rounds = rounded.logprobs(everything, len(ids), frozen)
    assert compression(response)["rounds"] == rounds >= 4
    # The two sides' arithmetic differs in the last bits, which occasionally rounds a number to its other neighbour.
    error = (expected.gather(1, tokens) - values).abs()
    assert error.median() < TOLERANCE
    assert error.mean() < 20 * TOLERANCE
    dense, _ = Oracle(**{**vars(rounded), "budget": 10_000}).logprobs(everything, len(ids), frozen)
    assert (dense.gather(1, tokens) - values).abs().mean() > 200 * TOLERANCE


@pytest.mark.wide
@pytest.mark.parametrize("selection", ["per-layer-head", "shared-mean"])
def test_logits_on_two_ranks(serve, oracle, selection):
    """Prevents ranks from keeping tokens of each other's heads or, in a shared set, different tokens."""
    ids = prompt(9, 40)
    flags = ("--tp-size", "2", "--triattention-selection", selection)
    response = serve(*flags, env=two_cores()).generate(ids, 200, logprobs=True)
    account = Oracle(**{**vars(oracle), "selection": selection})
    expected, rounds = account.logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
    assert compression(response)["rounds"] == rounds >= 4
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE


def test_logits_of_requests_compacted_together(serve, oracle):
    """Prevents one request's scores, lengths or slots from leaking into another's within one batched round, and first
    rounds at other steps than that of the first request which is due."""
    stem = prompt(8, 40)
    prompts = [stem + prompt(20 + i, length) for i, length in enumerate((3, 17, 24))]
    client = serve("--page-size", "16", "--triattention-rounds-per-step", "2")
    client.generate(stem, 1)
    responses = client.generate_all(prompts, 200, logprobs=True)
    # All decode from the same step on. The first has the most private tokens of its prompt, the second a few fewer, so
    # its first round comes early, with that of the first. The third has its rounds when they are due.
    for ids, response, early in zip(prompts, responses, (0, 11 - 9, 0), strict=True):
        frozen = len(ids) - len(ids) % 16
        expected, rounds = oracle.logprobs(ids + response["output_ids"][:-1], len(ids), frozen, early=early)
        values, tokens = served_logprobs(response)
        assert compression(response)["rounds"] == rounds >= 3
        assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("page_size", "selection"), [wide(32, "per-head"), (64, "union"), wide(128, "per-layer-head")], ids=str
)
def test_logits_where_nothing_divides_the_page(serve, oracle, page_size, selection):
    """Prevents off-by-one pages if budget, interval, recent tokens and prompt end anywhere within a page."""
    lengths = {"budget": 67, "interval": 29, "recent": 13}
    flags = [word for name, value in lengths.items() for word in (f"--triattention-{name}", str(value))]
    ids = prompt(13, page_size + 9)
    client = serve("--page-size", str(page_size), "--triattention-selection", selection, *flags)
    response = client.generate(ids, 240, logprobs=True)
    report = compression(response)
    assert report["frozen_length"] == page_size
    expected, rounds = Oracle(**{**vars(oracle), **lengths, "selection": selection}).logprobs(
        ids + response["output_ids"][:-1], len(ids), page_size
    )
    assert report["rounds"] == rounds >= 5
    assert report["freed_slots"] % page_size == 0
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE


@pytest.mark.parametrize("rope", [wide("yarn"), wide("partial-interleaved"), "partial-interleaved-yarn"])
def test_logits_with_other_rotary_embeddings(serve, tmp_path_factory, rope):
    """Prevents scoring with other frequencies, dims or pairs than those the model rotates its keys with, dims that are
    left out, and a wrong weight of rotated against other dims."""
    model = build_tiny_model(tmp_path_factory.mktemp("models"), rope)
    ids = prompt(12, 45)
    client = serve(model=model)
    response = client.generate(ids, 240, logprobs=True)
    assert "of the 32 dims" not in client.server.log_path.read_text()
    right = oracle_of(model)
    expected, rounds = right.logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
    assert compression(response)["rounds"] == rounds >= 5
    values, tokens = served_logprobs(response)
    assert (expected.gather(1, tokens) - values).abs().max() < TOLERANCE
    wrong = [{"inv_freq": right.inv_freq * 1.5}]
    if "partial" in rope:
        wrong.append({"unrotated": None})
    if rope == "partial-interleaved-yarn":
        wrong.append({"scaling": 1.0})
    for change in wrong:
        changed, _ = Oracle(**{**vars(right), **change}).logprobs(ids + response["output_ids"][:-1], len(ids), len(ids))
        assert (changed.gather(1, tokens) - values).abs().max() > 50 * TOLERANCE
