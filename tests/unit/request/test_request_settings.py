"""What a request may ask for, and the one sentence for each mistake."""

import dataclasses

import pytest

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.request.options import FIELDS, CompressionOptions, read_request, with_media
from sglang_triattn.rounds.rules import complete

CONFIG = complete(Config("s", budget=256, interval=64, recent=32))


def ask(**fields):
    return read_request(CONFIG, {"triattention": fields, "thinking_budget": 7}).settings


def test_defaults_are_the_servers():
    """Prevents requests that ask for nothing from being treated differently from what the flags say."""
    assert read_request(CONFIG, None) == read_request(CONFIG, {"thinking_budget": 7}) == CompressionOptions(CONFIG)
    assert ask() == CONFIG


def test_each_field_is_taken():
    """Prevents a field that is accepted and ignored."""
    asked = ask(budget=100, interval=20, recent=9, prompt="compact")
    assert asked == dataclasses.replace(CONFIG, budget=100, interval=20, recent=9, prompt="compact")
    assert ask(enabled=False) is None
    named = read_request(CONFIG, {"triattention": {"conversation": "c", "release": True}})
    assert named == CompressionOptions(CONFIG, conversation="c", release=True)


def test_whose_rows_wait():
    """Prevents a name that a server without conversations ignores, rows of requests that declined or have images, and
    a last turn that no client can mark where rows need no name."""
    off, auto = (dataclasses.replace(CONFIG, conversations=kind) for kind in ("off", "auto"))
    with pytest.raises(TriAttentionError, match="this server keeps no conversations: leave it out, or start"):
        read_request(off, {"triattention": {"conversation": "c"}})
    assert read_request(off, None) == CompressionOptions(off)
    for asked in (None, {}, {"triattention": None}, {"triattention": {}}):
        assert read_request(auto, asked) == CompressionOptions(auto, auto=True)
    last = read_request(auto, {"triattention": {"release": True}})
    assert last == CompressionOptions(auto, release=True, auto=True)
    assert read_request(auto, {"triattention": {"conversation": "c"}}) == CompressionOptions(auto, "c")
    assert read_request(auto, {"triattention": {"enabled": False}}) == CompressionOptions(None)
    assert not with_media(read_request(auto, None), ["image"]).auto


def test_smaller_budgets_stay_consistent():
    """Prevents the server's recent tokens or floor from causing a small budget to be refused, or filling all of it."""
    assert [ask(budget=budget).recent for budget in (128, 20, 1)] == [16, 3, 1]
    config = dataclasses.replace(CONFIG, pressure_budget=128)
    assert read_request(config, {"triattention": {"budget": 64}}).settings.pressure_budget == 64


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"budget": 0}, "custom_params.triattention.budget is 0"),
        ({"budget": 257}, "from 1 to 256"),
        ({"budget": True}, "budget is true,"),
        ({"budget": 12.5}, "budget is 12.5"),
        ({"interval": 65}, "from 1 to 64"),
        ({"interval": "9"}, "interval is '9'"),
        ({"recent": -1}, "recent is -1"),
        ({"recent": 60, "budget": 50}, "from 0 to 50"),
        ({"prompt": "gone"}, "frozen or compact"),
        ({"prompt": {"a": None}}, "prompt is {'a': null}"),
        ({"turn_inputs": "frozen"}, "turn_inputs is 'frozen', but it must be keep or compact"),
        ({"turn_inputs": True}, "turn_inputs is true"),
        ({"bugdet": None}, "triattention.bugdet"),
        ({"enabled": 1}, "true or false"),
        ({"enabled": False, "budget": 0}, "budget is 0"),
        ({"conversation": ""}, "1 to 256 characters"),
        ({"conversation": 7}, "conversation is 7"),
        ({"conversation": "c" * 257}, "1 to 256 characters"),
        ({"conversation": "c", "enabled": False}, "does not work with enabled false"),
        ({"conversation": "c", "release": "yes"}, "release is 'yes'"),
        ({"release": True}, "names no conversation"),
        ({"bugdet": 3}, "triattention.bugdet"),
        ("compact", "must be an object"),
    ],
)
def test_mistakes_get_one_sentence(asked, words):
    """Prevents a mistyped field from being ignored, and a client from spending more than the operator allows."""
    with pytest.raises(TriAttentionError) as caught:
        read_request(CONFIG, {"triattention": asked})
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize("name", FIELDS)
def test_null_is_not_given(name):
    """Prevents refusing clients that send every field of a record, with null for those that have no value."""
    assert read_request(CONFIG, {"triattention": {name: None}}) == CompressionOptions(CONFIG)


def test_whole_numbers_of_protocol_buffers():
    """Prevents refusing every length that comes by gRPC, where all numbers are floating-point."""
    lengths = {"budget": 64.0, "interval": 32.0, "recent": 16.0}
    assert read_request(CONFIG, {"triattention": lengths}) == read_request(
        CONFIG, {"triattention": {name: int(value) for name, value in lengths.items()}}
    )
    for wrong in (64.5, float("inf"), float("nan")):
        with pytest.raises(TriAttentionError, match="whole number of tokens"):
            read_request(CONFIG, {"triattention": {"budget": wrong}})


def test_requests_keep_at_least_the_window():
    """Prevents a request from dropping tokens that the model's window layers still see."""
    server = complete(Config("s", budget=2048), window=512, page_size=16)
    asked = read_request(server, {"triattention": {"budget": 600}}).settings
    assert (asked.recent, asked.window, asked.round_to) == (512, 512, 16)
    for field, words in (({"budget": 500}, "budget is 500"), ({"recent": 511}, "recent is 511")):
        with pytest.raises(TriAttentionError, match=f"{words}, but it must be a whole number of tokens from 512"):
            read_request(server, {"triattention": field})


def test_images_freeze_a_prompt():
    """Prevents image tokens from being evicted because a flag or a client has prompts compacted."""
    compacting = read_request(CONFIG, {"triattention": {"prompt": "compact"}})
    assert with_media(compacting, ["image"]) == CompressionOptions(CONFIG)
    assert with_media(compacting, []) is compacting


@pytest.mark.parametrize(
    ("asked", "kinds", "words"),
    [
        ({}, ["image", "video"], "The prompt has video"),
        ({}, ["audio"], "The prompt has audio"),
        ({"conversation": "c"}, ["image"], "conversation does not work with images"),
    ],
)
def test_media_that_are_not_covered(asked, kinds, words):
    """Prevents rounds on rows whose frozen part is not known, but not uncompressed requests with the same media."""
    with pytest.raises(TriAttentionError, match=words) as caught:
        with_media(read_request(CONFIG, {"triattention": asked}), kinds)
    assert str(caught.value).endswith(".")
    declined = read_request(CONFIG, {"triattention": {"enabled": False}})
    assert with_media(declined, kinds) is declined


@pytest.mark.parametrize("kind", ["image", "audio"])
def test_models_of_which_text_alone_is_covered(kind):
    """Prevents rounds after images that SGLang computes in a way that was not tested."""
    config = dataclasses.replace(CONFIG, images=False)
    with pytest.raises(TriAttentionError, match=f"The prompt has {kind}, but compression covers only text"):
        with_media(read_request(config, None), [kind])
    assert with_media(read_request(config, None), []).settings is config
