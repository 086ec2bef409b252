"""Steps that prefill prompts and decode other requests (--enable-mixed-chunk)."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from family_servers import WITH_BUFFER, WITHOUT_BUFFER, prepared, started
from harness import BUDGET, INTERVAL, KEYS_ALONE, Client, assert_pool_is_whole, compression, prompt, two_cores
from oracle import TOLERANCE, Oracle, oracle_of
from sets import wide
from storm import FLAGS, RETRACTING, assert_withstood, storm

MIXED = "--enable-mixed-chunk"
CHUNKS = ("--chunked-prefill-size", "64")


@pytest.mark.parametrize(("page_size", "selection"), [wide(1, "shared-mean"), (16, "per-layer-head")])
def test_rounds_in_mixed_steps(probed, tiny, page_size, selection):
    """Prevents requests that grow past their bound for as long as prompts are being prefilled, rounds at other moments
    than in pure decode steps, and wrong positions in mixed steps."""
    flags = ("--page-size", str(page_size), "--triattention-selection", selection, *KEYS_ALONE)
    client, steps = probed(MIXED, *flags, *CHUNKS)
    account = oracle_of(tiny)
    account.selection, account.value_share = selection, 0.0
    hold_mixed_steps_to_account(client, steps, account, page_size)


@pytest.mark.wide
@pytest.mark.parametrize("page_size", [1, 16])
def test_mixed_steps_of_stages(probed, tiny, page_size):
    """Prevents a pipeline stage from planning other rounds than the next one for what decodes in a mixed step."""
    flags = ("--page-size", str(page_size), "--pp-size", "2", *KEYS_ALONE)
    client, steps = probed(MIXED, *flags, *CHUNKS, env=two_cores())
    account = oracle_of(tiny)
    account.value_share = 0.0
    hold_mixed_steps_to_account(client, steps, account, page_size)


@pytest.mark.wide
@pytest.mark.parametrize("flags", [WITH_BUFFER, WITHOUT_BUFFER])
def test_states_in_mixed_steps(probed, tmp_path, flags):
    """Prevents states of decoding requests that a prefill in the same step changes, or that see a token twice."""
    tiny, account = prepared(tmp_path, "qwen3-next")
    account.selection, account.window = "shared-mean", 0
    selection = ("--triattention-selection", "shared-mean")
    client, steps = started(probed, tiny, "qwen3-next", MIXED, *selection, *CHUNKS, *flags)
    hold_mixed_steps_to_account(client, steps, account, 1)


def serve_in_mixed_steps(
    client: Client, steps: Callable[[], list[dict]], prompts: list[list[int]]
) -> tuple[list[dict], list[list[int]]]:
    """The answers to prompts while others are prefilled, and for each its row's lengths in the steps that were mixed.

    Args:
        steps: returns what the probe wrote since the last call.
    """
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(client.generate_all, prompts, 300)
        others = [pool.submit(client.generate, prompt(60 + n, 1500), 2) for n in range(8)]
        answers = answers.result()
        assert all(len(other.result()["output_ids"]) == 2 for other in others)
    mixed = [step["mixed"] for step in steps() if "mixed" in step]
    names = [answer["meta_info"]["id"] for answer in answers]
    return answers, [[lengths[name] for lengths in mixed if name in lengths] for name in names]


def hold_mixed_steps_to_account(client: Client, steps: Callable[[], list[dict]], account: Oracle, page_size: int):
    """Serves three requests while prompts are prefilled all the time, and compares their best tokens with the account.

    SGLang mixes nothing while log-probabilities are asked for.

    Args:
        steps: returns what the probe wrote since the last call.
    """
    stem = prompt(51, 32)
    prompts = [stem + prompt(52 + n, 17 + n) for n in range(3)]
    # How many steps are mixed depends on when prompts arrive.
    for _ in range(3):
        client.flush()
        steps()
        client.generate(stem, 1)
        answers, mixed = serve_in_mixed_steps(client, steps, prompts)
        # Long enough for several rounds, while nothing but mixed steps ran.
        if min(map(len, mixed)) > 3 * INTERVAL:
            break
    assert min(map(len, mixed)) > 3 * INTERVAL

    for ids, response, lengths in zip(prompts, answers, mixed, strict=True):
        output, report = response["output_ids"], compression(response)
        assert max(lengths) <= report["frozen_length"] + account.budget + INTERVAL
        assert report["frozen_length"] == len(ids) - len(ids) % page_size
        expected, rounds = account.logprobs(ids + output[:-1], len(ids), report["frozen_length"])
        assert report["rounds"] == rounds >= 5
        best = expected.max(-1)
        chosen = expected.gather(1, expected.new_tensor(output).long()[:, None])[:, 0]
        assert (best.values - chosen).max() < 2 * TOLERANCE
    assert_pool_is_whole(client)


@pytest.mark.wide
def test_answers_below_the_trigger(serve):
    """Prevents compression from changing an answer, a log-probability or a prefix hit before it has evicted."""
    flags = (MIXED, "--page-size", "16", "--chunked-prefill-size", "64")
    client, plain = serve(*flags), serve(*flags, compressed=False)
    stem = prompt(1, 90)
    for ids in (stem, stem + prompt(3, 50)):
        ours, theirs = (each.generate(ids, BUDGET, logprobs=True) for each in (client, plain))
        assert compression(ours)["rounds"] == 0
        for field in ("output_token_logprobs", "output_top_logprobs", "cached_tokens"):
            assert ours["meta_info"][field] == theirs["meta_info"][field]
    assert ours["meta_info"]["cached_tokens"] == 80


@pytest.mark.wide
def test_storm_of_mixed_steps(serve):
    """Prevents leaks, hangs and lengths that disagree where requests are aborted or retracted out of mixed steps."""
    client = serve(MIXED, "--page-size", "16", "--max-total-tokens", "1024", *FLAGS, env=RETRACTING)
    _, finished = storm(client, 7, 40, (24, BUDGET), 1500, conversations=6)
    assert_withstood(client, finished, 40)
