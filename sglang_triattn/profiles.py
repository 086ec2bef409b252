"""Profiles: settings that were measured together, by name.

A profile keeps the composition of what stays, which was the best of all that were measured at each of these shares
(docs/quality.md), and chooses how much stays: a half, a quarter or an eighth of LONG_ANSWER tokens. Of longer answers,
`conservative` still keeps a half: with less, answers lose what they stated. `recent` and `value_share` are not listed,
because they follow from these settings and from what else the user gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_triattn.errors import TriAttentionError, quoted

LONG_ANSWER = 8192
"""Tokens of the answer of which the profiles keep the shares that were measured."""

PROFILES: dict[str, dict[str, Any]] = {
    "conservative": {"budget": LONG_ANSWER // 2, "keep_share": 0.5, "interval": 128, "selection": "per-layer-head"},
    "balanced": {"budget": LONG_ANSWER // 4, "interval": 128, "selection": "per-layer-head"},
    "aggressive": {"budget": LONG_ANSWER // 8, "interval": 128, "selection": "per-layer-head"},
}
METAVAR = "|".join(PROFILES)
HELP = (
    "settings that were measured together: sets budget, keep share, interval, recent, selection and value share; any "
    "of them that is given too wins, even with its default value"
)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a user gave, by field of Config, completed by those of the given profile, if any.

    Raises:
        TriAttentionError: there is no profile of that name.
    """
    name = given.get("profile")
    if name is None:
        return dict(given)
    if not isinstance(name, str) or name not in PROFILES:
        raise TriAttentionError(
            f"--triattention-profile is {quoted(name)}, but the profiles are {', '.join(PROFILES)}: use one of these, "
            "or leave it out."
        )
    return {**PROFILES[name], **given}
