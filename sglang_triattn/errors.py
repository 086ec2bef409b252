"""The exception for user errors, and short forms of what its messages quote."""

import difflib
import reprlib
from collections.abc import Iterable


class TriAttentionError(ValueError):
    """A setting, file or model that cannot work.

    The message is one sentence for the user: what is wrong, what was expected, what to do. Command-line tools print it
    without a traceback; `sglang.Engine` raises it unchanged.
    """


class _Quotes(reprlib.Repr):
    """Values as users write them, in JSON and YAML: Python's own words for these mean nothing there."""

    def repr_bool(self, value: bool, level: int) -> str:
        return "true" if value else "false"

    def repr_NoneType(self, value: None, level: int) -> str:
        return "null"


_QUOTES = _Quotes()
_QUOTES.maxlevel, _QUOTES.maxstring, _QUOTES.maxother, _QUOTES.maxlong = 2, 64, 64, 64
_QUOTES.maxlist = _QUOTES.maxtuple = _QUOTES.maxdict = 8
LONGEST_QUOTE = 200


def quoted(value: object) -> str:
    """A value for a message: in ASCII and at most LONGEST_QUOTE characters, for any input of a client or file."""
    try:
        text = _QUOTES.repr(value)
    except (ValueError, RecursionError):
        # An integer of thousands of digits.
        text = f"of type {type(value).__name__}"
    text = text.encode("ascii", "backslashreplace").decode()
    return text if len(text) <= LONGEST_QUOTE else f"{text[: LONGEST_QUOTE - 3]}..."


def suggestion(name: str, known: Iterable[str]) -> str:
    """What to do about a name that does not exist: the nearest of the known ones, for the end of a sentence."""
    nearest = difflib.get_close_matches(name, list(known), n=1)
    return f"use {nearest[0]}, or leave it out." if nearest else "leave it out."


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type name, short enough to quote in a sentence."""
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:200].rstrip(". ")


def type_and_line(error: BaseException) -> str:
    """Type and first line of an error's message."""
    return f"{type(error).__name__}: {first_line(error)}"
