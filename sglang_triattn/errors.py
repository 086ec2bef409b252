"""The exception for user errors, and a one-line form of any other error's message."""


class TriAttentionError(ValueError):
    """A setting, file or model that cannot work.

    The message is one sentence for the user: what is wrong, what was expected, what to do. Command-line tools print it
    without a traceback; `sglang.Engine` raises it unchanged.
    """


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or else its type name, short enough to quote in a sentence."""
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:200].rstrip(". ")
