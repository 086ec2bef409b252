"""The one exception a user may cause, and what others say in one line."""


class TriAttentionError(ValueError):
    """A setting, file or model that cannot work.

    The message is one sentence for the user: what is wrong, what was expected, what to do. At a command line it
    is printed without a traceback; from `sglang.Engine` it is raised as it is.
    """


def first_line(error: BaseException) -> str:
    """What an error says, short enough for one sentence: the first line of its message, or its name."""
    text = getattr(error, "strerror", None) or (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text[:200].rstrip(". ")
