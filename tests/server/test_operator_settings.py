"""Settings of SGLang by which an operator changes what compression does for all requests."""

from __future__ import annotations

import json

import pytest

from harness import POOL, Client, compression, greedy, prompt
from word_tokenizer import text

PREFERRED = {"budget": 32, "interval": 8, "recent": 16}
TOKENS = 150
# The pool does not hold this answer uncompacted.
LONG = POOL + 200


@pytest.fixture
def client(serve, chat_model):
    """A server whose operator prefers small budgets, and that prefills prompts whole."""
    preferred = json.dumps({"custom_params": {"triattention": PREFERRED}})
    # Without chunks, SGLang sets aside for activations more than a test machine has, unless given a share.
    flags = ("--preferred-sampling-params", preferred, "--chunked-prefill-size", "-1", "--mem-fraction-static", "0.5")
    return serve(*flags, "--context-length", "8192", model=chat_model, tokenizer=True)


def rounds_of(client: Client, endpoint: str, **body) -> int:
    before = client.totals()["rounds"]
    more = {"model": "m", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    response = client.post(endpoint, **more, **body)
    assert response.status_code == 200, response.text
    return client.totals()["rounds"] - before


def test_preferred_settings_reach_every_endpoint(client):
    """Prevents settings of all requests from being lost where SGLang's OpenAI endpoints send a null in their place."""
    expected = (TOKENS - 1 - 40) // 8 + 1
    chat = {"messages": [{"role": "user", "content": text(1, 20)}]}
    assert compression(client.generate(prompt(1, 20), TOKENS))["rounds"] == expected
    assert rounds_of(client, "/v1/chat/completions", **chat) == expected
    assert rounds_of(client, "/v1/completions", prompt=text(2, 20)) == expected
    assert rounds_of(client, "/v1/completions", prompt=text(3, 20), custom_params={"other": 1}) == expected
    # What a request says itself replaces them as a whole.
    own = {"custom_params": {"triattention": {"enabled": False}}}
    assert rounds_of(client, "/v1/chat/completions", **chat, **own) == 0
    own = {"custom_params": {"triattention": {"interval": 16}}}
    assert rounds_of(client, "/v1/completions", prompt=text(4, 20), **own) == (TOKENS - 1 - 80) // 16 + 1


def test_prompts_that_are_prefilled_whole(client):
    """Prevents an answer that ends early, and advice that does not help, without a line that says why."""
    assert f"prefills prompts whole, as it would a request that was retracted: its pool of {POOL:,}" in (
        client.server.log_path.read_text()
    )
    compact = {"custom_params": {"triattention": {"prompt": "compact"}}}
    for sampling in ({}, compact):
        response = client.post("/generate", input_ids=prompt(5, LONG), sampling_params=greedy(4, **sampling))
        assert response.status_code == 400
        assert "--triattention-prompt compact" not in response.text
