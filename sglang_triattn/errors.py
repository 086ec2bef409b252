"""The one exception a user may cause."""


class TriAttentionError(ValueError):
    """A setting, file or model that cannot work.

    The message is one sentence for the user: what is wrong, what was expected, what to do. At a command line it
    is printed without a traceback; from `sglang.Engine` it is raised as it is.
    """
