"""Conversations that headers and fields of other APIs name, and requests that a header opts out, at one server."""

from __future__ import annotations

import json

import pytest
import requests

from harness import assert_pool_is_whole, compression, greedy, prompt
from word_tokenizer import text

FIELDS = "prompt_cache_key,previous_response_id,metadata.user_id,X-Chat-Id,user"
NAME, SWITCH, CHAT = "X-TriAttention-Conversation", "X-TriAttention", "x-chat-id"
# Specials are left out of a text, which would then have other ids.
WORDS_ONLY = {"0": -100, "1": -100, "2": -100}
# For endpoints that have no such fields. Their settings of compression reach requests that name nothing of their own.
PREFERRED = {"ignore_eos": True, "temperature": 0, "logit_bias": WORDS_ONLY, "custom_params": {"triattention": {}}}
BUDGET, INTERVAL, TOKENS = 16, 8, 40
ALL = {"model": "default", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0, "logit_bias": WORDS_ONLY}


@pytest.fixture
def client(serve, chat_model):
    """The Client of a server that takes names from FIELDS."""
    flags = ["--enable-response-store", "--preferred-sampling-params", json.dumps(PREFERRED)]
    for name, value in (("budget", BUDGET), ("interval", INTERVAL), ("recent", 4), ("name-fields", FIELDS)):
        flags += [f"--triattention-{name}", str(value)]
    return serve(*flags, model=chat_model, tokenizer=True)


def send(client, path: str, headers: dict | None = None, **body) -> requests.Response:
    return requests.post(client.url + path, json=body, headers=headers, timeout=600)


def answered(client, path: str, headers: dict | None = None, **body) -> dict:
    response = send(client, path, headers, **body)
    assert response.status_code == 200, response.text
    return response.json()


def generate(client, ids: list[int], headers: dict | None = None, settings: dict | None = None, **body) -> dict:
    """The report of an answer to a prompt of token ids; `settings` are those of the request itself."""
    custom = {} if settings is None else {"custom_params": {"triattention": settings}}
    body = {"input_ids": ids, "sampling_params": greedy(TOKENS, **custom), **body}
    return compression(answered(client, "/generate", headers, **body))


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def chat(client, messages: list, headers: dict, **fields) -> str:
    answer = answered(client, "/v1/chat/completions", headers, messages=messages, **ALL, **fields)
    return answer["choices"][0]["message"]["content"]


def streamed_chat(client, messages: list, headers: dict, **fields) -> str:
    body = {**ALL, "messages": messages, "stream": True}
    response = send(client, "/v1/chat/completions", headers, **body, **fields)
    chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


def completion(client, messages: list, headers: dict, **fields) -> str:
    whole = " ".join(message["content"] for message in messages)
    return answered(client, "/v1/completions", headers, prompt=whole, **ALL, **fields)["choices"][0]["text"]


def native(client, messages: list, headers: dict, **fields) -> str:
    whole = " ".join(message["content"] for message in messages)
    sampling = {"max_new_tokens": TOKENS}
    return answered(client, "/generate", headers, text=whole, sampling_params=sampling, **fields)["text"]


def anthropic(client, messages: list, headers: dict, **fields) -> str:
    body = {"model": "default", "max_tokens": TOKENS, "messages": messages}
    return answered(client, "/v1/messages", headers, **body, **fields)["content"][0]["text"]


def ollama(client, messages: list, headers: dict) -> str:
    body = {"model": "default", "messages": messages, "stream": False, "options": {"num_predict": TOKENS}}
    return answered(client, "/api/chat", headers, **body)["message"]["content"]


def resumed(client, act) -> int:
    """Turns that resumed a row while `act()` ran."""
    before = client.totals()["conversations_resumed"]
    act()
    return client.totals()["conversations_resumed"] - before


def talk(client, endpoint, headers: dict | None = None, **fields) -> None:
    """Two turns."""
    messages = [user(text(1, 30))]
    answer = endpoint(client, messages, headers or {}, **fields)
    assert len(answer.split()) == TOKENS
    messages += [{"role": "assistant", "content": answer}, user(text(2, 10))]
    endpoint(client, messages, headers or {}, **fields)


@pytest.mark.parametrize(
    ("endpoint", "headers", "fields"),
    [
        (native, {NAME: "a"}, {}),
        (chat, {NAME: "b"}, {}),
        (chat, {}, {"prompt_cache_key": "c"}),
        (streamed_chat, {CHAT: "d"}, {}),
        (completion, {}, {"user": "e"}),
        (anthropic, {}, {"metadata": {"user_id": "f"}}),
        (ollama, {NAME: "ü g"}, {}),
        (ollama, {CHAT: "h"}, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value) or "-",
)
def test_each_source_names(client, endpoint, headers, fields):
    """Prevents a client's turns from being prefilled again because the name that it can send does not arrive."""
    headers = {name: value.encode() for name, value in headers.items()}
    assert resumed(client, lambda: talk(client, endpoint, headers, **fields)) == 1
    assert_pool_is_whole(client)


def test_nothing_names(client):
    """Prevents rows of clients that name nothing, or whose fields hold what is no name, from waiting."""
    junk = {"prompt_cache_key": "c" * 257, "metadata": {"user_id": ["c"]}, "user": ""}
    for fields in ({}, {"prompt_cache_key": 7, "metadata": "c"}, junk):
        assert resumed(client, lambda fields=fields: talk(client, chat, {CHAT: b"\xff"}, **fields)) == 0
    assert client.totals()["conversations_parked"] == 0
    assert_pool_is_whole(client)


def test_chain_of_responses(client):
    """Prevents a response that goes on after another from being prefilled again, and rows that none can follow."""

    model = client.setting("served_model_name")

    def respond(seed: int, previous: str | None, **more) -> str:
        body = {"model": model, "input": text(seed, 20), "max_output_tokens": TOKENS, **more}
        response = send(client, "/v1/responses", **body, previous_response_id=previous)
        assert response.status_code == 200, response.text
        if not more.get("stream"):
            return response.json()["id"]
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        return events[-1]["response"]["id"]

    def chain() -> None:
        first = respond(1, None)
        respond(4, respond(3, respond(2, first), stream=True))

    assert resumed(client, chain) == 3
    assert client.totals()["conversations_parked"] == 1
    respond(5, None, store=False)
    assert client.totals()["conversations_parked"] == 1
    assert_pool_is_whole(client)


def test_order_of_sources(client):
    """Prevents two names in one request from depending on chance, and a client's own settings from being lost."""
    ids = prompt(1, 30)
    # Each source, and all that come after it.
    settings = {"conversation": "custom"}
    headers = {NAME: "header", CHAT: "chat"}
    fields = {"prompt_cache_key": "key", "user": "user"}
    for expected, source, first in (
        ("custom", settings, "conversation"),
        ("header", headers, NAME),
        ("key", fields, "prompt_cache_key"),
        ("chat", headers, CHAT),
        ("user", fields, "user"),
    ):
        body = {**ALL, **fields, "messages": [user(text(3, 30))], "custom_params": {"triattention": settings}}
        report = answered(client, "/v1/chat/completions", headers, **body)["choices"][0]["meta_info"]["triattention"]
        del source[first]
        assert (report["conversation"], report["conversation_kept"]) == ("new", True)
        assert client.totals()["conversations_parked"] == 1
        # Other ids end the talk of that name.
        assert generate(client, ids, settings={"conversation": expected, "release": True})["conversation"] == "diverged"
    report = generate(client, ids, {NAME: "small"}, {"budget": 8, "release": True})
    assert (report["conversation"], report["conversation_kept"]) == ("new", False)
    assert report["rounds"] == (TOKENS - 1 - 8) // INTERVAL
    assert_pool_is_whole(client)


def test_opting_out(client):
    """Prevents a client that asked for exact answers from getting others, or its row from taking memory."""
    ids = prompt(2, 30)
    exact = generate(client, ids, settings={"enabled": False})
    assert exact["rounds"] == 0
    for headers in ({SWITCH: "off"}, {SWITCH: "OFF", CHAT: "c"}):
        report = generate(client, ids, headers)
        assert (report["rounds"], "conversation" in report) == (0, False)
    assert generate(client, ids)["rounds"] > 0
    rounds = client.totals()["rounds"]
    for endpoint in (streamed_chat, anthropic, ollama):
        assert resumed(client, lambda endpoint=endpoint: talk(client, endpoint, {SWITCH: "off"})) == 0
    assert client.totals()["rounds"] == rounds
    assert_pool_is_whole(client)


BAD = {
    "long": ({NAME: "c" * 257}, "1 to 256 characters"),
    "empty": ({NAME: ""}, "1 to 256 characters"),
    "no UTF-8": ({NAME: b"\xff"}, "1 to 256 characters"),
    "switch": ({SWITCH: "on"}, "The header X-TriAttention is 'on', but it must be off"),
    "both": ({NAME: "c", SWITCH: "off"}, "In the header X-TriAttention-Conversation, custom_params"),
}


@pytest.mark.parametrize("case", BAD)
def test_wrong_headers_are_refused(client, case):
    """Prevents a wrong header from being ignored, and streams and other endpoints from hiding what is wrong."""
    headers, words = BAD[case]
    for path in ("/generate", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"):
        response = send(client, path, headers, stream=True)
        message = response.json()["error"]["message"]
        assert (response.status_code, words in message, message.endswith(".")) == (400, True, True)
    # SGLang's own page of models is not refused.
    assert requests.get(f"{client.url}/v1/models", headers=headers, timeout=60).status_code == 200
    body = {"text": "w5", "sampling_params": {"custom_params": {"triattention": {"conversation": "c"}}}}
    for stream in (False, True):
        response = send(client, "/generate", {SWITCH: "off"}, **body, stream=stream)
        assert (response.status_code, "enabled false" in response.text) == (400, True)
