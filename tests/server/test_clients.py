"""Common clients on one server that takes and returns text: the packages openai and anthropic, and plain HTTP."""

from __future__ import annotations

import json

import anthropic
import openai
import pytest
import requests

from harness import BUDGET, Client, assert_pool_is_whole, compression, prompt
from word_tokenizer import text, word_tokenizer

# Bans words that an answer's text leaves out, so that what is sent back has the ids that were generated.
WORDS_ONLY = {"0": -100, "1": -100, "2": -100}
PLAIN = {"ignore_eos": True, "separate_reasoning": False}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@pytest.fixture
def ask(chat_client):
    """`ask(**options)` sends a greedy chat with the openai client."""
    client = openai.OpenAI(base_url=f"{chat_client.url}/v1", api_key="none", max_retries=0, timeout=600)

    def create(*, messages=None, words=40, seed=1, settings=None, body=None, **options):
        custom = {} if settings is None else {"custom_params": {"triattention": settings}}
        return client.chat.completions.create(
            **{"model": "default", "temperature": 0, "max_tokens": 150, "logit_bias": WORDS_ONLY, **options},
            messages=messages or [user(text(seed, words))],
            extra_body={**PLAIN, **custom, **(body or {})},
        )

    create.client = client
    return create


def user(content: str) -> dict:
    return {"role": "user", "content": content}


def rounds_of(client: Client, act) -> tuple[int, object]:
    """Rounds of the server while `act()` ran, and what it returned."""
    before = client.totals()["rounds"]
    result = act()
    return client.totals()["rounds"] - before, result


def test_chat_plain_and_streamed(chat_client, ask):
    """Prevents chunks that are lost or doubled around a round, and usage that counts the compressed row."""
    rounds, whole = rounds_of(chat_client, ask)
    assert rounds == 2
    answer = whole.choices[0].message.content
    assert len(answer.split()) == 150
    assert whole.choices[0].finish_reason == "length"
    # The message, and the template's words user, done and assistant.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens, whole.usage.total_tokens) == (43, 150, 193)

    rounds, chunks = rounds_of(chat_client, lambda: list(ask(stream=True, stream_options={"include_usage": True})))
    assert rounds == 2
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == answer
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (43, 150, 193)
    assert usage.prompt_tokens_details.cached_tokens == 42
    assert_pool_is_whole(chat_client)


def test_choices_of_one_prompt(chat_client, ask):
    """Prevents several answers from compressing for one another, or the usage from counting only one of them."""
    rounds, response = rounds_of(chat_client, lambda: ask(n=3, temperature=1.0))
    answers = [choice.message.content for choice in response.choices]
    assert [len(answer.split()) for answer in answers] == [150] * 3
    assert len(set(answers)) == 3
    assert rounds == 6
    assert (response.usage.prompt_tokens, response.usage.completion_tokens) == (43, 450)
    assert_pool_is_whole(chat_client)


def test_settings_of_a_request(chat_client, ask):
    """Prevents `extra_body` from being lost between the openai client and the scheduler."""
    assert rounds_of(chat_client, ask)[0] == 2
    assert rounds_of(chat_client, lambda: ask(settings={"enabled": False}))[0] == 0
    small = {"budget": 32, "interval": 8, "recent": 8}
    # The first at 40 tokens, then every 8; the last sampled token is never computed.
    assert rounds_of(chat_client, lambda: ask(settings=small))[0] == (149 - 40) // 8 + 1
    streamed = rounds_of(chat_client, lambda: list(ask(settings=small, stream=True)))
    assert streamed[0] == 14
    completion = {"model": "default", "prompt": text(2, 40), "max_tokens": 150, "temperature": 0}
    extra = {"ignore_eos": True, "custom_params": {"triattention": small}}
    assert rounds_of(chat_client, lambda: ask.client.completions.create(**completion, extra_body=extra))[0] == 14


def test_chat_that_continues_its_row(chat_client, ask):
    """Prevents usage that counts evicted tokens as new, and chat turns that are computed from the start."""
    messages = [user(text(11, 40))]
    settings = {"conversation": "chat"}
    first = ask(messages=messages, settings=settings)
    # At most the word that every prompt begins with.
    assert first.usage.prompt_tokens_details.cached_tokens <= 1
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, user(text(12, 10))]
    second = ask(messages=messages, settings=settings)
    # Done; then user, ten words, done; then assistant.
    assert second.usage.prompt_tokens == 43 + 150 + 1 + 12 + 1
    assert second.usage.prompt_tokens_details.cached_tokens == 43 + 149
    assert second.usage.completion_tokens == 150
    messages += [{"role": "assistant", "content": second.choices[0].message.content}, user(text(13, 10))]
    chunks = list(ask(messages=messages, settings=settings, stream=True, stream_options={"include_usage": True}))
    usage = chunks[-1].usage
    assert usage.prompt_tokens == second.usage.total_tokens + 14
    assert usage.prompt_tokens_details.cached_tokens == second.usage.total_tokens - 1
    assert usage.completion_tokens == 150
    assert_pool_is_whole(chat_client)


def test_reports_of_all_kinds_of_answers(chat_client, ask):
    """Prevents a report that only `/generate` shows, and fields that clients did not ask for."""
    settings = {"budget": 32, "interval": 8, "recent": 8}
    whole = ask(settings=settings, n=2, temperature=1.0)
    assert [choice.meta_info["triattention"]["rounds"] for choice in whole.choices] == [14, 14]
    chunks = list(ask(settings=settings, n=2, temperature=1.0, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens == 300
    assert_reported([choice for chunk in chunks for choice in chunk.choices])
    completions = ask.client.completions
    completion = {"model": "default", "prompt": text(2, 40), "max_tokens": 150, "n": 2}
    extra = {"ignore_eos": True, "custom_params": {"triattention": settings}}
    whole = completions.create(**completion, extra_body=extra)
    assert [choice.meta_info["triattention"]["rounds"] for choice in whole.choices] == [14, 14]
    assert whole.usage.completion_tokens == 300
    streamed = completions.create(**completion, stream=True, extra_body=extra)
    assert_reported([choice for chunk in streamed for choice in chunk.choices])
    asked_by_sglang = ask(body={"return_meta_info": True})
    assert asked_by_sglang.choices[0].meta_info["triattention"]["rounds"] == 2
    for answer in (ask(), completions.create(model="default", prompt=text(2, 9), max_tokens=3)):
        assert not hasattr(answer.choices[0], "meta_info")
    assert_pool_is_whole(chat_client)


def assert_reported(choices: list) -> None:
    """Asserts that both choices of a stream end with their report, and that no other chunk has one."""
    ends = [choice for choice in choices if hasattr(choice, "meta_info")]
    assert [choice.finish_reason for choice in ends] == ["length", "length"]
    assert {choice.index for choice in ends} == {0, 1}
    assert all(choice.meta_info["triattention"]["rounds"] == 14 for choice in ends)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_ollama(chat_client, stream):
    """Prevents Ollama's clients from running uncompressed, and documents that say something else than SGLang does."""

    def chat(**options) -> requests.Response:
        body = {"model": "default", "messages": [user(text(5, 40))], "stream": stream}
        options = {"temperature": 0, "num_predict": 150, **options}
        return requests.post(f"{chat_client.url}/api/chat", json={**body, "options": options}, timeout=600)

    # The endpoint has no ignore_eos: this answer happens not to end earlier.
    rounds, response = rounds_of(chat_client, chat)
    assert rounds == 2
    last = json.loads(response.text.splitlines()[-1])
    assert (last["done"], last["done_reason"], "triattention" in response.text) == (True, "stop", False)
    joined = "".join(json.loads(line)["message"]["content"] for line in response.text.splitlines())
    # A stream leaves out its last piece, which may be several words.
    assert 100 < len(joined.split()) < 150 if stream else len(joined.split()) == 150
    if not stream:
        assert chat(num_ctx=8, custom_params={"triattention": {"budget": -1}}).json()["eval_count"] == 150
        assert chat(seed=1).status_code == 500
    assert_pool_is_whole(chat_client)


@pytest.mark.parametrize("together", ["n", "batch"])
def test_one_of_several_answers_is_kept(chat_client, together):
    """Prevents every answer under one conversation's name from saying that its row waits for the next turn."""
    ids = prompt(23, 40)
    custom = {"triattention": {"conversation": together}}
    sampling = {"max_new_tokens": 150, "ignore_eos": True, "custom_params": custom, "temperature": 1}
    if together == "n":
        body = {"input_ids": ids, "sampling_params": {**sampling, "n": 3}}
    else:
        body = {"input_ids": [ids] * 3, "sampling_params": [sampling] * 3}
    answers = chat_client.post("/generate", **body).json()
    kept = [compression(answer)["conversation_kept"] for answer in answers]
    assert sorted(kept) == [False, False, True]
    starts = [
        compression(chat_client.generate(ids + answers[place]["output_ids"] + [7], 5, custom_params=custom))
        for place in (kept.index(True), kept.index(False))
    ]
    assert starts[0]["conversation"] == "resumed"
    assert starts[1]["conversation"] != "resumed"
    assert_pool_is_whole(chat_client)


def test_reasoning_and_tools(chat_client, ask):
    """Prevents compressed answers from losing their reasoning, and requests with tools from failing."""
    rounds, response = rounds_of(chat_client, lambda: ask(tools=[TOOL], body={"separate_reasoning": True}))
    message = response.choices[0].message
    assert rounds == 2
    assert not message.tool_calls
    # A random model never stops thinking.
    assert not message.content
    assert len(message.reasoning_content.split()) == 150
    assert response.usage.reasoning_tokens == 150
    chunks = list(ask(tools=[TOOL], body={"separate_reasoning": True}, stream=True))
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks if chunk.choices]
    assert "".join(thoughts).split() == message.reasoning_content.split()
    messages = [user(text(3, 20)), {"role": "tool", "tool_call_id": "1", "content": text(4, 20)}]
    assert ask(messages=messages, tools=[TOOL]).usage.completion_tokens == 150


BAD = {
    "budget": (
        {"budget": 0},
        "custom_params.triattention.budget is 0, but it must be a whole number of tokens from 1 to "
        f"{BUDGET}, what the server was started with.",
    ),
    "unknown": (
        {"bugdet": 32},
        "custom_params.triattention.bugdet is not a setting of a request; these are enabled, budget, interval, recent, "
        "keep_share, prompt, turn_inputs, conversation, release.",
    ),
}


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_wrong_settings_are_refused(chat_client, ask, case, stream):
    """Prevents a stream from starting with status 200, and tokens, for a request that cannot be served."""
    settings, sentence = BAD[case]
    with pytest.raises(openai.BadRequestError) as chat:
        ask(settings=settings, stream=stream)
    assert chat.value.body["message"] == sentence
    custom = {"custom_params": {"triattention": settings}}
    with pytest.raises(openai.BadRequestError) as completion:
        ask.client.completions.create(model="default", prompt=["w5", "w6"], stream=stream, extra_body=custom)
    assert completion.value.body["message"] == sentence
    for body in (
        {"text": "w5 w6", "sampling_params": custom},
        {"text": ["w5", "w6"], "sampling_params": [{}, custom]},
    ):
        response = requests.post(f"{chat_client.url}/generate", json={**body, "stream": stream}, timeout=60)
        assert (response.status_code, response.json()) == (400, {"error": {"message": sentence}})
    assert_pool_is_whole(chat_client)


def test_anthropic_messages(chat_client):
    """Prevents Messages, whole or streamed, from running uncompressed or counting the compressed row."""
    client = anthropic.Anthropic(base_url=chat_client.url, api_key="none", max_retries=0, timeout=600)
    # The endpoint has no ignore_eos: this answer happens not to end earlier.
    request = {"model": "default", "max_tokens": 150, "messages": [user(text(5, 40))], "extra_body": {"temperature": 0}}
    rounds, message = rounds_of(chat_client, lambda: client.messages.create(**request))
    assert rounds == 2
    assert message.stop_reason == "max_tokens"
    usage = message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == 43
    assert usage.output_tokens == 150
    thoughts = "".join(block.thinking for block in message.content if block.type == "thinking")
    assert thoughts

    def stream():
        with client.messages.stream(**request) as events:
            return events.get_final_message()

    rounds, streamed = rounds_of(chat_client, stream)
    assert rounds == 2
    assert "".join(block.thinking for block in streamed.content if block.type == "thinking").split() == thoughts.split()
    assert streamed.usage.output_tokens == 150
    assert_pool_is_whole(chat_client)


def test_native_text(chat_client):
    """Prevents text from /generate, whole or streamed, from differing from the ids that it stands for."""
    sampling = {"max_new_tokens": 150, "temperature": 0, "ignore_eos": True}
    body = {"text": text(6, 40), "sampling_params": sampling}
    whole = chat_client.post("/generate", **body).json()
    assert compression(whole)["rounds"] == 2
    assert whole["text"] == word_tokenizer().decode(whole["output_ids"], skip_special_tokens=True)
    lines = requests.post(f"{chat_client.url}/generate", json={**body, "stream": True}, timeout=600).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    last = json.loads(lines[-3].removeprefix("data: "))
    assert (last["text"], compression(last)) == (whole["text"], compression(whole))
