"""Options of one request: `custom_params={"triattention": {...}}` in its sampling parameters.

The server's flags are the defaults and, for lengths, the upper limits: the operator decides what a client may spend.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from sglang_triattn.config import LEAST_SHARE, PROMPTS, TURN_INPUTS, flag, is_keep_share
from sglang_triattn.errors import TriAttentionError, quoted
from sglang_triattn.rounds.rules import RoundRules

KEY = "triattention"
FIELDS = ("enabled", "budget", "interval", "recent", "keep_share", "prompt", "turn_inputs", "conversation", "release")
LONGEST_NAME = 256


UNKNOWN_FIELD, WRONG_VALUE, CONFLICT, MEDIA = REASONS = ("unknown_field", "wrong_value", "conflict", "media")
"""Why a request is refused: a field that does not exist, one out of range or of the wrong type, fields that contradict
each other or the request, media that compression does not cover."""


class RequestError(TriAttentionError):
    """A request that is refused; `reason` is one of REASONS."""

    def __init__(self, sentence: str, reason: str = WRONG_VALUE) -> None:
        super().__init__(sentence)
        self.reason = reason


@dataclass(frozen=True)
class CompressionOptions:
    """Options of one request.

    Attributes:
        settings: None if the request declined compression.
        conversation: the name under which its row is kept, and looked up at its start.
        release: whether the conversation ends with this request.
        auto: whether it may resume a row that it finds by its tokens, and leave one, without a name.
    """

    settings: RoundRules | None
    conversation: str | None = None
    release: bool = False
    auto: bool = False


def read_request(config: RoundRules, custom_params: object) -> CompressionOptions:
    """Reads the options of one request.

    Args:
        config: the server's settings.
        custom_params: what the request's sampling parameters hold; keys other than KEY are ignored. A field that is
            null counts as not given.

    Raises:
        RequestError: a field is unknown, of the wrong type, out of range, or contradicts another.
    """
    unasked = CompressionOptions(config, auto=config.conversations == "auto")
    if not custom_params:
        return unasked
    if not isinstance(custom_params, Mapping):
        raise RequestError(f"custom_params is {quoted(custom_params)}, but it must be an object.")
    asked = custom_params.get(KEY)
    if asked is None:
        return unasked
    if not isinstance(asked, Mapping):
        raise RequestError(
            f"custom_params.{KEY} is {quoted(asked)}, but it must be an object with {', '.join(FIELDS)}."
        )
    unknown = min((str(name) for name in asked if name not in FIELDS), default=None)
    if unknown is not None:
        raise RequestError(
            f"custom_params.{KEY}.{quoted(unknown)[1:-1]} is not a setting of a request; these are "
            f"{', '.join(FIELDS)}.",
            UNKNOWN_FIELD,
        )
    # As clients mean it that send every field of a record.
    asked = {name: value for name, value in asked.items() if value is not None}
    enabled, release = _switch(asked, "enabled", True), _switch(asked, "release", False)
    budget = _tokens(asked, "budget", max(config.window, 1), config.budget)
    interval = _tokens(asked, "interval", 1, config.interval)
    # The server's share, applied to a smaller budget.
    share = max(-(-config.recent * budget // config.budget), config.window)
    recent = _tokens(asked, "recent", config.window, budget, default=share)
    keep_share = _keep_share(asked, config.keep_share)
    prompt = _choice(asked, "prompt", PROMPTS, config.prompt)
    turn_inputs = _choice(asked, "turn_inputs", TURN_INPUTS, config.turn_inputs)
    conversation = _name(asked)
    if conversation is not None and config.conversations == "off":
        raise RequestError(
            f"custom_params.{KEY}.conversation is {quoted(conversation)}, but this server keeps no conversations: "
            f"leave it out, or start the server with {flag('conversations')} named.",
            CONFLICT,
        )
    auto = conversation is None and config.conversations == "auto"
    if release and conversation is None and not auto:
        raise RequestError(f"custom_params.{KEY}.release names no conversation: add the field conversation.", CONFLICT)
    if not enabled:
        if conversation is not None:
            raise RequestError(
                f"custom_params.{KEY}.conversation does not work with enabled false, because only compressed requests "
                "leave a row: leave one of the two out.",
                CONFLICT,
            )
        return CompressionOptions(None)
    pressure = config.pressure_budget
    if pressure is not None:
        pressure = max(min(pressure, budget), recent, 1)
    lengths = {"budget": budget, "interval": interval, "recent": recent, "pressure_budget": pressure}
    settings = replace(config, **lengths, keep_share=keep_share, prompt=prompt, turn_inputs=turn_inputs)
    return CompressionOptions(settings, conversation, release, auto)


def with_media(options: CompressionOptions, kinds: Collection[str]) -> CompressionOptions:
    """The options of a request that has images or the like: its prompt is frozen in any case.

    Args:
        kinds: what it has, in lower case: image, video, audio.

    Raises:
        RequestError: compression does not cover them, or not together with a conversation.
    """
    if not kinds or options.settings is None:
        return options
    others = sorted(set(kinds) - {"image"})
    if not options.settings.images:
        raise RequestError(
            f"The prompt has {min(kinds)}, but compression covers only text on this server: leave it out, or set "
            f"custom_params.{KEY}.enabled to false.",
            MEDIA,
        )
    if others:
        raise RequestError(
            f"The prompt has {others[0]}, but of what is not text compression covers images alone: leave it out, or "
            f"set custom_params.{KEY}.enabled to false.",
            MEDIA,
        )
    if options.conversation is not None:
        raise RequestError(
            f"custom_params.{KEY}.conversation does not work with images, which are found by their places in a whole "
            "prompt, and a resumed row is not one: leave one of the two out.",
            CONFLICT,
        )
    return replace(options, settings=replace(options.settings, prompt="frozen"), auto=False)


def _choice(asked: Mapping[str, Any], name: str, choices: Sequence[str], default: str | None) -> str | None:
    if name not in asked:
        return default
    value = asked[name]
    if not isinstance(value, str) or value not in choices:
        raise RequestError(f"custom_params.{KEY}.{name} is {quoted(value)}, but it must be {' or '.join(choices)}.")
    return value


def _switch(asked: Mapping[str, Any], name: str, default: bool) -> bool:
    value = asked.get(name, default)
    if not isinstance(value, bool):
        raise RequestError(f"custom_params.{KEY}.{name} is {quoted(value)}, but it must be true or false.")
    return value


def _name(asked: Mapping[str, Any]) -> str | None:
    if "conversation" not in asked:
        return None
    name = asked["conversation"]
    if not is_name(name):
        raise RequestError(
            f"custom_params.{KEY}.conversation is {quoted(name)}, but it must be a name of 1 to {LONGEST_NAME} "
            "characters."
        )
    return name


def is_name(name: object) -> TypeGuard[str]:
    """Whether a conversation may have this name: JSON may also hold halves of surrogate pairs, which are no text."""
    if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME:
        return False
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _keep_share(asked: Mapping[str, Any], most: float) -> float:
    value = asked.get("keep_share", most)
    if not is_keep_share(value, most):
        numbers = f"0 or a number from {LEAST_SHARE} to {most:g}" if most else "0"
        raise RequestError(
            f"custom_params.{KEY}.keep_share is {quoted(value)}, but it must be {numbers}, what the server was started "
            "with."
        )
    return value


def _tokens(asked: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    value = asked.get(name, most if default is None else default)
    # Protocol buffers have one type for numbers.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise RequestError(
            f"custom_params.{KEY}.{name} is {quoted(value)}, but it must be a whole number of tokens from {least} to "
            f"{most}, {'the budget' if name == 'recent' else 'what the server was started with'}."
        )
    return value
