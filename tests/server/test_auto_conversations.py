"""Turns without a name: rows of finished requests that are found by their tokens, cut, shared out, and given up."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import openai
import pytest

from family_servers import WITHOUT_BUFFER, prepared, started
from harness import STAGES, assert_pool_is_whole, compression, cores_for, prompt, served_logprobs
from oracle import TOLERANCE, oracle_of
from sets import wide
from state_settings import STATE_FAMILIES
from turn_account import hold_to_account
from word_tokenizer import text

AUTO = ("--triattention-conversations", "auto")
PROMPT, ANSWER = 48, 150
ANSWERS, LESS, INPUTS = (145, 149, 150), (1, 5), (95, 96)
"""Tokens of three turns' answers; how many of their last ones the next turn does not find in the row, which have come
after the last round, so that no choice depends on them; and what that turn brings. All starts are whole pages of 16."""


def start_of(response: dict) -> str:
    return compression(response)["conversation"]


def talk(client, answers: tuple[int, ...] = ANSWERS, **sampling) -> tuple[list[dict], list[list[int]], list]:
    """Three turns that name nothing; the second repeats the whole history, the last leaves out its end.

    Returns:
        The responses; the prompts; half-open ranges of the tokens that later turns brought.
    """
    ids, responses, prompts, inputs = prompt(31, PROMPT), [], [], []
    for number, answer in enumerate(answers):
        prompts.append(ids)
        responses.append(client.generate(ids, answer, logprobs=True, **sampling))
        if number < len(LESS):
            whole = ids + responses[-1]["output_ids"]
            held = len(whole) - LESS[number]
            # The last token has no K/V, so that it is computed again if it is repeated.
            ids = whole[: held + (number == 0)] + prompt(40 + number, INPUTS[number])
            inputs.append((held, len(ids)))
    return responses, prompts, inputs


@pytest.mark.parametrize(
    "flags",
    [
        ("--page-size", "1"),
        wide(("--page-size", "16")),
        wide(("--page-size", "1", "--triattention-selection", "shared-mean")),
        wide(("--page-size", "1", "--tp-size", "2")),
        wide(("--page-size", "1", *STAGES)),
        wide(("--page-size", "16", "--disable-radix-cache")),
    ],
    ids=" ".join,
)
def test_logits_of_turns_that_are_found(serve, tiny, flags):
    """Prevents a turn from being computed from the start because nothing names it, and wrong positions, kept sets or
    tokens after a row that is cut where the history was edited."""
    client = serve(*flags, *AUTO, env=cores_for(flags))
    account = oracle_of(tiny)
    account.selection = "shared-mean" if "shared-mean" in flags else "per-layer-head"
    responses, prompts, inputs = talk(client)
    assert [start_of(response) for response in responses] == ["new", "resumed", "resumed"]
    assert all(compression(response)["conversation_kept"] for response in responses)
    for response, (held, _) in zip(responses[1:], inputs, strict=True):
        assert response["meta_info"]["cached_tokens"] == held
    hold_to_account(account, responses, prompts, inputs)
    client.flush()
    assert_pool_is_whole(client)


@pytest.mark.parametrize(
    ("family", "flags"),
    [
        ("lfm2", ()),
        wide("gpt-oss", ()),
        wide("qwen3-next", WITHOUT_BUFFER),
        wide("deepseek-v3", ()),
        wide("gemma3", ()),
        wide("gpt-oss", STAGES),
    ],
)
def test_logits_of_turns_that_are_found_in_other_models(serve, tmp_path, family, flags):
    """Prevents a row from being cut where its state, or its window, has seen more."""
    tiny, account = prepared(tmp_path, family)
    if family in STATE_FAMILIES:
        account.window = 0  # it has no layers with one
    client = started(serve, tiny, family, "--page-size", "1", *flags, *AUTO, env=cores_for(flags))
    # No round is due at an answer's end, where it depends on the scheduling whether it still runs.
    # Greedy answers of the random Gemma repeat a few tokens, and between equal values it is chance that decides.
    sampling = {"temperature": 1} if family == "gemma3" else {}
    responses, prompts, inputs = talk(client, (ANSWER, ANSWER, ANSWER), **sampling)
    assert [start_of(response) for response in responses] == ["new", "resumed", "resumed"]
    held = inputs[1][0]
    if family in STATE_FAMILIES:
        # A state cannot go back, but there is a copy of the one from before the second turn.
        held = inputs[0][0]
        responses, prompts, inputs = responses[::2], prompts[::2], [(held, len(prompts[2]))]
    assert responses[-1]["meta_info"]["cached_tokens"] == held
    hold_to_account(account, responses, prompts, inputs)
    client.flush()
    assert_pool_is_whole(client)
    serve.stop(client)


def test_what_is_not_found(serve):
    """Prevents a row from being resumed after other text, by another tenant, after it was released or declined, or in
    place of what the tree holds exactly; and a second branch of a text from starting anew."""
    client = serve("--page-size", "1", *AUTO)
    ids = prompt(41, 40)
    first = client.generate(ids, ANSWER)
    following = ids + first["output_ids"] + prompt(42, 12)
    sampling = {"max_new_tokens": 5, "temperature": 0, "ignore_eos": True}
    salted = client.post("/generate", input_ids=following, extra_key="another", sampling_params=sampling).json()
    assert start_of(salted) == "new"
    # Edited where rounds have left gaps.
    assert start_of(client.generate([*following[:60], 7, *following[61:]], 5)) == "new"
    declined = client.generate(following, 5, custom_params={"triattention": {"enabled": False}})
    assert start_of(declined) is None if "conversation" in compression(declined) else True
    client.flush()

    first = client.generate(ids, ANSWER)
    assert compression(first)["conversation_kept"]
    turns = [following + prompt(52, 3), following + prompt(53, 3)]
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda ids: client.generate(ids, ANSWER), turns))
    # One goes on with the row, the other with its copy.
    assert list(map(start_of, answers)) == ["resumed", "resumed"]

    released = client.generate(prompt(61, 40), ANSWER, custom_params={"triattention": {"release": True}})
    assert not compression(released)["conversation_kept"]
    assert start_of(client.generate(prompt(61, 40) + released["output_ids"] + [5], 5)) == "new"

    # The tree gets the whole text, so that nothing is lost.
    kept = client.generate(prompt(71, 40), ANSWER)
    whole = prompt(71, 40) + kept["output_ids"] + prompt(72, 12)
    client.generate(whole, 1, custom_params={"triattention": {"enabled": False}})
    exact = client.generate(whole, 5)
    assert start_of(exact) == "new"
    assert exact["meta_info"]["cached_tokens"] >= len(whole) - 1
    client.flush()
    assert_pool_is_whole(client)


def test_an_edit_before_inputs_that_have_moved(serve, tiny):
    """Prevents a row from being cut before a message that lies at its front by now, and would stay."""
    client = serve("--page-size", "1", "--triattention-budget", "96", "--triattention-recent", "80", *AUTO)
    account = replace(oracle_of(tiny), budget=96, recent=80)
    ids = prompt(43, PROMPT)
    first = client.generate(ids, ANSWER)
    history = ids + first["output_ids"]
    second = client.generate(history + prompt(44, 20), 60)
    assert start_of(second) == "resumed"
    assert compression(second)["rounds"] >= 2
    held = len(history) - 2
    edited = [*history[:held], 7, *prompt(45, 60)]
    # The copy of the row as the first turn has left it.
    third = client.generate(edited, 60, logprobs=True)
    assert start_of(third) == "resumed"
    assert third["meta_info"]["cached_tokens"] == held
    hold_to_account(account, [first, third], [ids, edited], [(held, len(edited))])


def test_a_client_that_knows_nothing_of_it(serve, chat_model):
    """Prevents a plain OpenAI chat, without a field of this package, from being prefilled from the start each turn."""
    server = serve("--enable-cache-report", *AUTO, model=chat_model, tokenizer=True)
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600)
    messages, total = [], 0
    for turn in range(3):
        messages.append({"role": "user", "content": text(90 + turn, 30)})
        # Bans the words that an answer's text leaves out, so that what is sent back has the ids that were generated.
        answer = client.chat.completions.create(
            model="default",
            messages=messages,
            temperature=0,
            max_tokens=ANSWER,
            logit_bias={"0": -100, "1": -100, "2": -100},
            extra_body={"ignore_eos": True},
        )
        # All but the last token, whose K/V is missing.
        assert turn == 0 or answer.usage.prompt_tokens_details.cached_tokens == total - 1
        total = answer.usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    server.flush()
    assert_pool_is_whole(server)


def interrupt(client, ids: list[int], params: dict) -> None:
    """Sends a prompt, and aborts its answer before its first round."""
    sampling = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True, **params}
    rid = f"interrupted {len(ids)} {params}"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/generate", rid=rid, input_ids=ids, sampling_params=sampling)
        time.sleep(0.5)
        client.post("/abort_request", rid=rid)
        answer = running.result().json()["meta_info"]
    assert answer["finish_reason"]["type"] == "abort"
    assert answer["triattention"]["rounds"] == 0, "the abort came too late"


@pytest.mark.parametrize("name", [wide(None), "interrupted"])
def test_a_turn_that_is_interrupted(serve, name):
    """Prevents a client that goes away in the middle of an answer, or sends a turn again, from losing its conversation,
    and its retry from being prefilled from the start."""
    client = serve("--page-size", "1", "--triattention-interval", "2000", *AUTO)
    settings = {} if name is None else {"conversation": name}
    params = {"custom_params": {"triattention": settings}}
    ids = prompt(81, 40)
    first = client.generate(ids, ANSWER, custom_params={"triattention": {"interval": 32, **settings}})
    assert compression(first)["rounds"] > 0
    following = ids + first["output_ids"] + prompt(82, 200)
    interrupt(client, following, params)
    again = client.generate(following, ANSWER, **params)
    assert start_of(again) == "resumed"
    # The row that was interrupted has the whole prompt; its last token is computed again.
    assert again["meta_info"]["cached_tokens"] == len(following) - 1
    retried = client.generate(following, ANSWER, **params)
    assert start_of(retried) == "resumed"
    assert retried["output_ids"] == again["output_ids"]
    if name is not None:
        # Other text under the name takes the row only once it has been answered.
        interrupt(client, prompt(83, 30), params)
        last = client.generate(following + retried["output_ids"] + prompt(84, 5), 5, **params)
        assert start_of(last) == "resumed"
        assert start_of(client.generate(prompt(85, 30), 5, **params)) == "diverged"
        assert start_of(client.generate(following, 5, **params)) == "lost"
    client.flush()
    assert_pool_is_whole(client)


def abort_after_a_round(client, ids: list[int], params: dict) -> None:
    """Sends a prompt, and aborts its answer after its first rounds."""
    sampling = {"max_new_tokens": 3000, "temperature": 0, "ignore_eos": True, **params}
    before, rid = client.totals()["rounds"], f"aborted {params}"
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.post, "/generate", rid=rid, input_ids=ids, sampling_params=sampling)
        while client.totals()["rounds"] == before and not running.done():
            time.sleep(0.02)
        client.post("/abort_request", rid=rid)
        report = compression(running.result().json())
    assert report["rounds"] > 0, "the abort came too early"
    assert (report["conversation"], report["conversation_kept"]) == ("resumed", True)


@pytest.mark.parametrize(
    ("family", "flags", "name"),
    [
        (None, ("--page-size", "1"), None),
        wide(None, ("--page-size", "16"), "failing"),
        wide("gpt-oss", ("--page-size", "1"), "failing"),
        wide("lfm2", ("--page-size", "1"), None),
        wide("qwen3-next", ("--page-size", "1", *WITHOUT_BUFFER), None),
        wide("qwen3-next", ("--page-size", "64"), None),
        wide("gpt-oss", ("--page-size", "16"), None),
        wide("deepseek-v3", ("--page-size", "1"), None),
        wide(None, ("--page-size", "1", "--tp-size", "2"), "failing"),
        wide(None, ("--page-size", "1", *STAGES), None),
    ],
)
def test_a_turn_that_fails_after_a_round(serve, tiny, tmp_path, family, flags, name):
    """Prevents a turn that is aborted, or asked for again, from costing the row that its rounds have compacted, and
    its retry from reading another row's K/V, windows or states."""
    served, account = (tiny, oracle_of(tiny)) if family is None else prepared(tmp_path, family)
    if family in STATE_FAMILIES:
        account.window = 0
    plain = family is None
    client = serve(*flags, *AUTO, env=cores_for(flags)) if plain else started(serve, served, family, *flags, *AUTO)
    params = {} if name is None else {"custom_params": {"triattention": {"conversation": name}}}
    ids, answer = prompt(31, PROMPT), ANSWERS[0] if family is None else ANSWER
    first = client.generate(ids, answer, logprobs=True, **params)
    held = len(ids) + answer - 1
    following = ids + first["output_ids"] + prompt(32, INPUTS[0])
    undisturbed = client.generate(following, ANSWER, logprobs=True, **params)
    client.flush()
    assert client.generate(ids, answer, **params)["output_ids"] == first["output_ids"]
    abort_after_a_round(client, following, params)
    for _ in range(2):
        again = client.generate(following, ANSWER, logprobs=True, **params)
        assert start_of(again) == "resumed"
        assert again["meta_info"]["cached_tokens"] == held
        (values, tokens), (expected, same) = served_logprobs(again), served_logprobs(undisturbed)
        assert tokens.equal(same)
        assert (values - expected).abs().max() < TOLERANCE
    if "1" in flags:
        hold_to_account(account, [first, again], [ids, following], [(held, len(following))])
    client.flush()
    assert_pool_is_whole(client)
    if family is not None:
        serve.stop(client)


@pytest.mark.parametrize(
    ("page_size", "pool", "conversations", "flags"),
    [
        (1, 1408, 8, ()),
        wide(1, 4096, 24, ()),
        wide(16, 4096, 24, ()),
        wide(1, 1408, 8, STAGES),
        wide(16, 4096, 24, STAGES),
    ],
)
def test_a_storm_of_turns(serve, page_size, pool, conversations, flags):
    """Prevents slots from being lost or owned twice where rows are found, cut, raced for, aborted and dropped in a pool
    that cannot hold them all."""
    sizes = ("--page-size", str(page_size), "--max-total-tokens", str(pool), "--chunked-prefill-size", "64")
    client = serve(*sizes, *AUTO, *flags, env=cores_for(flags))

    def converse(number: int) -> list[str]:
        rng, starts = random.Random(number), []
        # Some share their first turn.
        ids = prompt(number // 2, 30)
        for turn in range(6):
            rid = f"turn-{page_size}-{number}-{turn}"
            if rng.random() < 0.2:
                threading.Timer(rng.uniform(0.05, 1.0), lambda rid=rid: client.post("/abort_request", rid=rid)).start()
            sampling = {"max_new_tokens": rng.choice([5, 120, 140]), "temperature": 0, "ignore_eos": True}
            response = client.post("/generate", rid=rid, input_ids=ids, sampling_params=sampling).json()
            starts.append(response["meta_info"].get("triattention", {}).get("conversation"))
            whole = ids + response.get("output_ids", [])
            ids = whole[: len(whole) - rng.choice([0, 0, 1, 3])] + prompt(rng.randrange(1000), rng.choice([1, 9, 80]))
            if len(ids) > 900:
                break
        return starts

    with ThreadPoolExecutor(conversations // 2) as threads:
        starts = [start for found in threads.map(converse, range(conversations)) for start in found]
    assert starts.count("resumed") > conversations * 5 // 12
    client.flush()
    assert_pool_is_whole(client)
