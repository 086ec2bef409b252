"""The switch of the census (`observability.census`) in the environment; it is read before a launch starts a process."""

from __future__ import annotations

import os

from sglang_triattn.errors import TriAttentionError

VARIABLE = "SGLANG_TRIATTN_CHECK"


def is_wanted() -> bool:
    """Whether the environment enables the census.

    Raises:
        TriAttentionError: it says neither yes nor no.
    """
    value = os.environ.get(VARIABLE, "")
    if value not in ("", "0", "1"):
        raise TriAttentionError(f"{VARIABLE} is {value!r}: set it to 1 to check every slot at every round, or to 0.")
    return value == "1"
