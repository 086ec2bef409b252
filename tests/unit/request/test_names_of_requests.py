"""Names and settings from headers and from fields of other APIs; tests/server/test_request_names.py asks a server."""

import pytest
from starlette.datastructures import Headers

from sglang_triattn.config import read_name_fields
from sglang_triattn.request import names
from sglang_triattn.request.names import Chains, foreign_name, settings_in, with_settings
from sglang_triattn.request.options import RequestError

FIELDS = read_name_fields("prompt_cache_key, metadata.a.b,X-Chat-Id,previous_response_id,user")
LONG = "c" * 257


def name(body: object, chain: str | None = None, **headers: str) -> str | None:
    return foreign_name(FIELDS, Headers(headers), body, chain)


def test_fields_are_read():
    """Prevents a field that an operator lists from being ignored."""
    assert read_name_fields(None) == ()
    assert FIELDS == ("prompt_cache_key", "metadata.a.b", "X-Chat-Id", "previous_response_id", "user")


def test_the_first_field_that_has_a_name_counts():
    """Prevents two names in one request from depending on their order in the body."""
    body = {"user": "u", "metadata": {"a.b": "m"}, "prompt_cache_key": "k"}
    assert name(body, "r", **{"x-chat-id": "h"}) == "k"
    for junk in (None, 7, "", LONG, ["k"], "\ud800"):
        assert name({**body, "prompt_cache_key": junk}) == "m"
    assert name({**body, "prompt_cache_key": None, "metadata": {"a": {"b": "m"}}}, **{"x-chat-id": "h"}) == "h"
    assert name({"user": "u", "metadata": 3}, "r", **{"x-chat-id": LONG}) == "r"
    assert name({"user": "u"}) == "u"
    assert name({"user": "c" * 256}) == "c" * 256


@pytest.mark.parametrize("body", [None, [], "user", {}, {"other": "c"}])
def test_nothing_is_named(body):
    """Prevents a body of another shape from ending in a traceback, and names that no field holds."""
    assert name(body) is None
    assert foreign_name((), Headers({"x-chat-id": "h"}), {"user": "u"}, "r") is None


def test_headers_are_settings():
    """Prevents a header from being read in one case alone, or its text from differing from that in a body."""
    assert settings_in(Headers({})) == {}
    assert settings_in(Headers({"x-triattention": "Off"})) == {"enabled": False}
    raw = Headers(raw=[(b"x-triattention-conversation", "ü".encode())])
    assert settings_in(raw) == {"conversation": "ü"}


@pytest.mark.parametrize(
    ("header", "value", "words"),
    [
        (names.SWITCH, "on", "The header X-TriAttention is 'on', but it must be off"),
        (names.SWITCH, "", "is '', but"),
        (names.CONVERSATION, "", "The header X-TriAttention-Conversation is '', but it must be a name of 1 to 256"),
        (names.CONVERSATION, LONG, "1 to 256 characters in UTF-8"),
        (names.CONVERSATION, "\xff", "is '\\xff', but"),
    ],
)
def test_wrong_headers_get_one_sentence(header, value, words):
    """Prevents a wrong header from being ignored."""
    with pytest.raises(RequestError) as caught:
        settings_in(Headers({header: value}))
    message = str(caught.value)
    assert words in message
    assert message.endswith(".")
    assert message.isascii()


def test_fields_of_the_body_stay():
    """Prevents a header from overriding what the client wrote into the request, and the loss of other parameters."""
    custom = {"thinking_budget": 3, "triattention": {"conversation": None, "budget": 8}}
    header = {"conversation": "h"}
    merged = {"thinking_budget": 3, "triattention": {"conversation": "h", "budget": 8}}
    assert with_settings(custom, header) == merged
    assert with_settings(merged, {"conversation": "x"}) == merged
    assert with_settings(None, header) == with_settings({"triattention": None}, header) == {"triattention": header}
    assert custom["triattention"]["conversation"] is None
    for junk in (7, "a", {"triattention": 3}, None, {}):
        assert with_settings(junk, {}) == junk
    for junk in (7, {"triattention": 3}, {"triattention": []}):
        assert with_settings(junk, header) == junk


def test_chains(monkeypatch):
    """Prevents a chain of responses from losing its row at its third turn, and a map that grows with every response."""
    monkeypatch.setattr(names, "REMEMBERED", 2)
    chains = Chains()
    assert chains.name("r1", None) == "r1"
    assert [chains.name(f"r{number + 1}", f"r{number}") for number in (1, 2, 3, 4)] == ["r1"] * 4
    # A branch has the name too, and its tokens decide.
    assert chains.name("s", "r1") == "r1"
    # What is forgotten begins a chain of its own.
    assert chains.name("t", "r2") == "r2"
    assert len(chains._names) == 2
