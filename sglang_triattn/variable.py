"""Settings of one server from the environment, for launches whose settings no plugin can extend.

SGLang loads plugins before it reads the flags of `sglang serve` and the keywords of `sglang.Engine`, but after a
program has built `ServerArgs`, and after SGLang's benchmarks have parsed their flags. The variable holds what would
stand on the command line: SGLANG_TRIATTENTION="--enable-triattention --triattention-budget 4096".
"""

from __future__ import annotations

import argparse
import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from sglang_triattn.config import ENABLE, OPTIONS, PREFIX, SWITCH, Config, add_flags, flag, read_settings
from sglang_triattn.errors import TriAttentionError, quoted, suggestion

VARIABLE = "SGLANG_TRIATTENTION"
_EXAMPLE = f'{VARIABLE}="{SWITCH} {flag("budget")} 4096"'


def words() -> str:
    """What the environment holds; empty if the variable is not set, or holds nothing but spaces."""
    return os.environ.get(VARIABLE, "").strip()


@contextmanager
def unset() -> Iterator[None]:
    """Takes the variable out of the environment for a time, also for processes that are started meanwhile."""
    held = os.environ.pop(VARIABLE, None)
    try:
        yield
    finally:
        if held is not None:
            os.environ[VARIABLE] = held


def read_launch(values: Mapping[str, Any]) -> Config | None:
    """Reads a Config from argument names and values, or else from the environment; None if neither asks for one.

    Args:
        values: names and values that were given, see `read_settings`; other names are ignored, and so is None.

    Raises:
        TriAttentionError: as `read_settings` and `from_environment` do, or if both have settings.
    """
    if not words():
        return read_settings(values)
    given = [
        name for name, value in values.items() if (name == ENABLE or name.startswith(PREFIX)) and value is not None
    ]
    if given:
        name = ENABLE if ENABLE in given else min(given)
        raise TriAttentionError(
            f"{'--' + name.replace('_', '-')} is set at this launch and the environment variable {VARIABLE} is "
            f"{quoted(words())}, but only one of the two places may hold the settings: unset {VARIABLE}, or leave out "
            "all settings of TriAttention at the launch."
        )
    return from_environment()


def from_environment() -> Config | None:
    """Reads a Config from the environment; None if the variable is not set.

    Raises:
        TriAttentionError: the variable holds a word that is no flag of this package, a value is wrong, or the switch is
            missing.
    """
    if not words():
        return None
    try:
        split = shlex.split(words())
    except ValueError as error:
        raise TriAttentionError(
            f"The environment variable {VARIABLE} is {quoted(words())}, which cannot be split into words "
            f"({error}): write it as on a command line, as in {_EXAMPLE}."
        ) from None
    parser = _Parser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    parsed, others = parser.parse_known_args(split)
    if others:
        name = next((word for word in others if word.startswith("-")), others[0]).partition("=")[0]
        hint = suggestion(name, [SWITCH, *(flag(option.name) for option in OPTIONS)])
        raise TriAttentionError(
            f"The environment variable {VARIABLE} holds {quoted(name)[1:-1]}, which is not a flag of sglang-triattn: "
            f"{hint}"
        )
    try:
        return read_settings(vars(parsed))
    except TriAttentionError as error:
        raise TriAttentionError(f"In the environment variable {VARIABLE}, {error}") from None


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise TriAttentionError(
            f"The environment variable {VARIABLE} is {quoted(words())}, which cannot be read ({message}): write it as "
            f"on a command line, as in {_EXAMPLE}."
        )
