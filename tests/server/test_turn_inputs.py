"""Inputs of resumed turns (messages, tool results), which stay whole while what the model generated is compacted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import harness
import kept_probe
from family_servers import WITHOUT_BUFFER, prepared, started
from harness import BUDGET, INTERVAL, KEYS_ALONE, assert_pool_is_whole, compression, cores_for, greedy, prompt
from oracle import oracle_of
from sets import wide
from state_settings import STATE_FAMILIES
from turn_account import hold_to_account

PROMPT, ANSWER = 48, 145
"""Whole pages of 16, together with the token that each answer leaves to the next turn."""
# With at least two rounds in each.
TURNS = 5
NAMED = {"triattention": {"conversation": "agent"}}
ORDERED = ("--triattention-recency", "0.25")


def talk(client, turns: int, length: int, answer: int = ANSWER, **sampling) -> tuple[list[dict], list[list[int]], list]:
    """A conversation whose later turns bring `length` tokens each.

    Returns:
        The responses; the prompts; half-open ranges of the tokens that later turns brought, the last one of the answer
        before among them: only its K/V was missing.
    """
    ids, responses, prompts, inputs = prompt(31, PROMPT), [], [], []
    for number in range(turns):
        prompts.append(ids)
        responses.append(client.generate(ids, answer, logprobs=True, custom_params=NAMED, **sampling))
        held = len(ids) + answer - 1
        ids = ids + responses[-1]["output_ids"] + prompt(40 + number, length)
        inputs.append((held, len(ids)))
    return responses, prompts, inputs[:-1]


@pytest.mark.parametrize(
    "flags",
    [
        wide(("--page-size", "1")),
        wide(("--page-size", "1", "--triattention-selection", "shared-mean")),
        wide(("--page-size", "16", *ORDERED)),
        wide(("--page-size", "16", "--triattention-recent", "40")),
        wide(("--page-size", "1", "--tp-size", "2", *ORDERED)),
        wide(("--page-size", "1", "--disable-radix-cache")),
        wide(("--page-size", "1", "--disable-overlap-schedule", "--chunked-prefill-size", "64")),
    ],
    ids=" ".join,
)
def test_logits_of_turns_whose_inputs_stay(serve, tiny, flags):
    """Prevents a round from evicting, scoring or counting what a resumed turn brought, wrong positions of what comes
    after it, and another kept set of what was generated."""
    account, ordered = oracle_of(tiny), ORDERED[0] in flags
    # Where values decide, ranks separate equal tokens of long answers.
    client = serve(*flags, *(() if ordered else KEYS_ALONE), env=cores_for(flags))
    account.value_share, account.recency = (None, float(ORDERED[1])) if ordered else (0.0, 0.0)
    account.selection = "shared-mean" if "shared-mean" in flags else "per-layer-head"
    if "--triattention-recent" in flags:
        account.recent = 40
    # Without overlap, a round that is due at an answer's end runs between the chunks of the next turn: none is.
    answer = 135 if "--disable-overlap-schedule" in flags else ANSWER
    # With the token before them, whole pages.
    responses, prompts, inputs = talk(client, TURNS, 95, answer)
    reports = [compression(response) for response in responses]
    assert [report["conversation"] for report in reports] == ["new", *["resumed"] * (TURNS - 1)]
    assert [report["protected_length"] for report in reports] == [96 * turn for turn in range(TURNS)]
    for report in reports:
        assert report["rounds"] >= 2
        bound = report["frozen_length"] + report["protected_length"] + BUDGET + INTERVAL
        assert report["physical_length"] <= bound
    hold_to_account(account, responses, prompts, inputs)
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {**NAMED["triattention"], "release": True}})
    assert_pool_is_whole(client)


@pytest.mark.parametrize(
    ("family", "page_size", "flags"),
    [
        wide("gpt-oss", 1, ()),
        wide("gemma3", 16, ()),
        wide("lfm2", 1, ()),
        wide("qwen3-next", 1, WITHOUT_BUFFER),
        wide("deepseek-v3", 1, ()),
    ],
)
def test_logits_of_turns_in_other_models(serve, tmp_path, family, page_size, flags):
    """Prevents a window that is cut short by inputs which have moved out of it, a state that a turn resumes too early
    or late, and latents that are scored because they came with a prompt."""
    tiny, account = prepared(tmp_path, family)
    account.round_to = page_size
    if family in STATE_FAMILIES:
        account.window = 0  # it has no layers with one
    client = started(serve, tiny, family, "--page-size", str(page_size), *flags)
    # No round is due at an answer's end, where it depends on the scheduling whether it still runs.
    # Greedy answers of this random model repeat a few tokens, and between equal values it is chance that decides.
    sampling = {"temperature": 1} if family == "gemma3" else {}
    responses, prompts, inputs = talk(client, TURNS, 63, 257, **sampling)
    reports = [compression(response) for response in responses]
    assert [report["conversation"] for report in reports] == ["new", *["resumed"] * (TURNS - 1)]
    assert all(report["rounds"] >= 3 for report in reports)
    assert reports[-1]["protected_length"] == 64 * (TURNS - 1)
    hold_to_account(account, responses, prompts, inputs)
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {**NAMED["triattention"], "release": True}})
    assert_pool_is_whole(client)
    serve.stop(client)


@pytest.fixture
def watched(serve, tmp_path):
    """Starts a server with `kept_probe`; returns its Client and a reader of what was held after each forward pass."""
    harness.install_plugin(tmp_path, "kept_probe", Path(kept_probe.__file__).read_text())
    file = tmp_path / "held.jsonl"

    def start(*flags):
        environment = {"PYTHONPATH": harness.python_path(tmp_path), "PROBE_FILE": str(file)}
        return serve(*flags, env=environment), lambda: harness.read_lines(file)

    return start


@pytest.mark.parametrize("page_size", [wide(1), 16])
def test_every_head_holds_every_input(watched, page_size):
    """Prevents a single input token from leaving any head of any layer, over many rounds and at lengths that are no
    whole pages."""
    client, batches = watched("--page-size", str(page_size), "--disable-overlap-schedule")
    responses, prompts, inputs = talk(client, 4, 37, 150)
    assert all(compression(response)["conversation"] == "resumed" for response in responses[1:])
    assert sum(compression(response)["rounds"] for response in responses) >= 8
    seen, brought = 0, []
    for response, (first, end) in zip(responses[1:], inputs, strict=True):
        name = response["meta_info"]["id"]
        held = [torch.tensor(batch[name]) for batch in batches() if name in batch]
        # The first pass computes the inputs: they are the row's last entries.
        brought.append(held[0][..., -(end - first) :])
        assert brought[-1].shape[-1] == end - first == 38
        for after in held:
            for numbers in brought:
                there = (numbers[..., :, None] == after[..., None, :]).any(-1)
                assert there.all(), f"{int((~there).sum())} input tokens are gone"
                seen += 1
    assert seen > 300
    answered = compression(responses[-1])
    assert len(prompts[-1]) + 149 - answered["conversation_evicted_tokens"] == answered["physical_length"]
    more = 0 if page_size == 1 else 6 * (page_size - 1)
    assert 3 * 38 <= answered["protected_length"] <= 3 * 38 + more


def test_a_request_chooses(serve):
    """Prevents a setting that is accepted and ignored, and inputs that are dropped once another turn asks for it."""
    client = serve("--page-size", "1")
    ids, lengths = prompt(31, PROMPT), []
    for number, asked in enumerate(
        ({}, {}, {"turn_inputs": "compact"}, {"prompt": "compact"}, {"turn_inputs": "keep"})
    ):
        params = {"triattention": {"conversation": "chooses", **asked}}
        response = client.generate(ids, ANSWER, custom_params=params)
        lengths.append(compression(response)["protected_length"])
        ids = ids + response["output_ids"] + prompt(50 + number, 20)
    assert lengths == [0, 21, 21, 21, 42]
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {"conversation": "chooses", "release": True}})
    assert_pool_is_whole(client)


def test_inputs_that_the_pool_cannot_hold(serve):
    """Prevents a turn from waiting forever, or from being compacted in silence, where its inputs leave no room; and a
    refused turn from costing the conversation its row."""
    client = serve("--page-size", "1", "--max-total-tokens", "512")
    params = {"triattention": {"conversation": "full"}}
    ids = prompt(31, PROMPT)
    first = client.generate(ids, 400, custom_params=params)
    assert compression(first)["conversation_kept"]
    following = ids + first["output_ids"]
    refused = client.post(
        "/generate", input_ids=following + prompt(32, 380), sampling_params=greedy(20, custom_params=params)
    )
    assert refused.status_code == 400
    message = refused.json()["error"]["message"]
    assert "the inputs of its resumed turns stay whole" in message
    compacted = {"triattention": {"conversation": "full", "turn_inputs": "compact"}}
    second = client.generate(following + prompt(33, 40), 100, custom_params=params)
    assert (compression(second)["conversation"], compression(second)["protected_length"]) == ("resumed", 41)
    longer = following + prompt(33, 40) + second["output_ids"] + prompt(34, 380)
    third = client.generate(longer, 20, custom_params=compacted)
    assert (compression(third)["conversation"], compression(third)["protected_length"]) == ("resumed", 41)
    assert compression(third)["rounds"] > 0
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {"conversation": "full", "release": True}})
    assert_pool_is_whole(client)


def test_a_long_input_in_chunks(serve, tiny):
    """Prevents rounds between the chunks of a long message from evicting it, and chunks that overrun the pool."""
    client = serve("--page-size", "1", "--chunked-prefill-size", "64", "--max-total-tokens", "1024")
    account = oracle_of(tiny)
    responses, prompts, inputs = talk(client, 2, 500)
    report = compression(responses[-1])
    assert (report["conversation"], report["protected_length"]) == ("resumed", 501)
    hold_to_account(account, responses, prompts, inputs)
    # A smaller budget makes a round due between two chunks: it takes none of the message.
    asked = {"triattention": {"conversation": "agent", "budget": 32, "interval": 16, "recent": 8}}
    ids = prompts[-1] + responses[-1]["output_ids"] + prompt(60, 200)
    third = client.generate(ids, 1, custom_params=asked)
    held = compression(third)
    assert (held["conversation"], held["protected_length"]) == ("resumed", 702)
    assert held["rounds"] >= 1
    assert held["physical_length"] == PROMPT + 702 + 32
    client.generate(prompt(33, 5), 1, custom_params={"triattention": {**NAMED["triattention"], "release": True}})
    assert_pool_is_whole(client)
