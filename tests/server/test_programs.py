"""Programs in SGLang's frontend language, on a server that compresses."""

from __future__ import annotations

import re

import pytest
import sglang as sgl
import torch
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint

from harness import assert_pool_is_whole, compression
from word_tokenizer import text, word_tokenizer

LONG = 120
"""Tokens of an answer with one round: it comes at 96 private tokens of the 119 that are computed."""


@pytest.fixture
def backend(chat_client):
    endpoint = RuntimeEndpoint(chat_client.url)
    sgl.set_default_backend(endpoint)
    yield chat_client
    sgl.set_default_backend(None)


def long(name: str, **options):
    return sgl.gen(name, max_tokens=LONG, temperature=0, ignore_eos=True, **options)


def alone(client, prompt: str) -> dict:
    """The answer to the same text, asked with nothing cached."""
    client.flush()
    sampling = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
    return client.post("/generate", text=prompt, sampling_params=sampling).json()


@sgl.function
def interview(s, topic):
    s += topic
    s += long("first")
    s += " w10 w11 w12"
    s += long("second")


@sgl.function
def tree(s, topic):
    s += topic
    # Only text that exists by now is cached before the branches start.
    s.sync()
    branches = s.fork(3)
    for index, branch in enumerate(branches):
        branch += f" w{20 + index} w{30 + index}"
        branch += long("answer")
    branches.join()
    s["branches"] = [branch["answer"] for branch in branches]
    s["prompts"] = [branch.text().removesuffix(branch["answer"]) for branch in branches]
    s["meta"] = [branch.get_meta_info("answer") for branch in branches]
    for branch in branches:
        s += branch["answer"]
    s += sgl.gen("end", max_tokens=8, temperature=0, ignore_eos=True)


def test_turns(backend):
    """Prevents a program's second question from being asked after other text than its first answer."""
    state = interview.run(topic=text(1, 30))
    first, second = (state.get_meta_info(name) for name in ("first", "second"))
    assert [meta["triattention"]["rounds"] for meta in (first, second)] == [1, 1]
    assert first["completion_tokens"] == second["completion_tokens"] == LONG
    asked = state.text().removesuffix(state["second"])
    assert asked == f"{text(1, 30)}{state['first']} w10 w11 w12"
    assert second["prompt_tokens"] == len(word_tokenizer().encode(asked))
    # The first prompt is exact, and so is its answer up to the first hole.
    assert second["cached_tokens"] >= 30
    expected = alone(backend, asked)
    assert (state["second"], second["triattention"]["rounds"]) == (expected["text"], compression(expected)["rounds"])
    assert_pool_is_whole(backend)


def test_fork_and_join(backend):
    """Prevents branches from compressing their shared prefix, or from evicting one another's tokens."""
    backend.flush()
    before = backend.totals()
    state = tree.run(topic=text(2, 200))
    after = backend.totals()
    assert [meta["triattention"]["rounds"] for meta in state["meta"]] == [1, 1, 1]
    assert after["rounds"] - before["rounds"] == 3
    assert after["evicted_tokens"] - before["evicted_tokens"] == 3 * 32
    for meta in state["meta"]:
        assert meta["cached_tokens"] >= 200
        assert meta["triattention"]["frozen_length"] == 202
    assert len(set(state["branches"])) == 3
    assert state.get_meta_info("end")["completion_tokens"] == 8
    for prompt, answer in zip(state["prompts"], state["branches"], strict=True):
        assert alone(backend, prompt)["text"] == answer
    assert_pool_is_whole(backend)


@sgl.function
def choose(s, topic, choices):
    s += topic
    s += long("thoughts")
    s += " w40"
    s += sgl.select("choice", choices=choices)


def test_select(backend, chat_model):
    """Prevents choices from being scored after a text with holes."""
    choices = [" w50 w51", " w60", " w70 w71 w72"]
    state = choose.run(topic=text(3, 30), choices=choices)
    assert state.get_meta_info("thoughts")["triattention"]["rounds"] == 1
    words, model = word_tokenizer(), chat_model.load()
    prompt = state.text().removesuffix(state["choice"])
    meta = state.get_meta_info("choice")
    for choice, scored in zip(choices, meta["input_token_logprobs"], strict=True):
        ids = torch.tensor([words.encode(prompt + choice)])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1)
        # SGLang's select looks at the last token but one of the prompt too, of which it gets no logprob.
        found = scored[1:]
        expected = logprobs.gather(1, ids[0, 1:, None])[-len(found) :, 0].tolist()
        assert [token for _, token, _ in found] == ids[0, -len(found) :].tolist()
        assert [logprob for logprob, _, _ in found] == pytest.approx(expected, abs=1e-3)
    scores = meta["normalized_prompt_logprobs"]
    assert state["choice"] == choices[scores.index(max(scores))]
    assert_pool_is_whole(backend)


@sgl.function
def constrained(s, topic):
    s += topic
    s += sgl.gen("words", max_tokens=LONG, temperature=0.8, regex="( w1[0-9]{0,2}){200}")


def test_regex(backend):
    """Prevents a grammar from losing its place when tokens that it has accepted are evicted."""
    state = constrained.run(topic=text(4, 20))
    assert state.get_meta_info("words")["triattention"]["rounds"] == 1
    assert re.fullmatch(f"( w1[0-9]{{0,2}}){{{LONG}}}", state["words"])
    assert_pool_is_whole(backend)


def test_stream_and_batch(backend):
    """Prevents streamed or batched programs from answering otherwise than one that runs alone."""
    topics = [text(seed, 30) for seed in range(10, 14)]
    states = interview.run_batch([{"topic": topic} for topic in topics], num_threads=4)
    for state in states:
        assert [state.get_meta_info(name)["triattention"]["rounds"] for name in ("first", "second")] == [1, 1]
    streamed = interview.run(topic=topics[0], stream=True)
    answers = ["".join(streamed.text_iter(name)) for name in ("first", "second")]
    assert answers == [states[0]["first"], states[0]["second"]]
    assert alone(backend, topics[0])["text"] == answers[0]
    assert_pool_is_whole(backend)
