"""The exception for user errors, and one-line forms of other messages."""

LONGEST_ANSWER = 600


class TriAttentionError(ValueError):
    """A setting, file or model that cannot work.

    The message is one sentence for the user: what is wrong, what was expected, what to do. Command-line tools print it
    without a traceback; `sglang.Engine` raises it unchanged.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type name, short enough to quote in a sentence."""
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:200].rstrip(". ")


def quotable(text: str) -> str:
    """A message that quotes what a client sent, made safe to answer and to log: printable, at most LONGEST_ANSWER long.

    Of a longer one both ends stay, because the quotation is in the middle.
    """
    end = LONGEST_ANSWER // 2
    cut = text if len(text) <= LONGEST_ANSWER else f"{text[: end - 3]}...{text[-end:]}"
    return "".join(character if character.isprintable() else "?" for character in cut)
