"""Records that nothing predicts: a model that reads them again must look each part up.

Ten layouts that programs and people write (addresses, JSON, assignments, logs, tables, lists, functions, requests,
sentences), filled with random words, numbers and identifiers.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence

_LAYOUTS = (
    "{Word} {Word}, {number} {word} street, phone {3}-{4}",
    '{{"id": "{name}", "{word}": {number}, "{word}": "{word} {word}"}}',
    "{word}_{word} = {number} + {word}_{1}",
    "{2}:{2}:{2} {word}[{4}]: {word} {word} {name} ({3} ms)",
    "{word},{3},{word},{2}.{2},{name}",
    "The {word} of {Word} is {number}, and the {word} of {Word} is {word}.",
    "- {word}: {word} {word} ({2} %)",
    "def {word}_{word}({word}, {word}={2}):\n    return {word}['{word}'] * {2}",
    "GET /{word}/{name}?{word}={3} -> {3}",
    "{Word} gave {Word} {2} {word}s for the {word} on {Word} {2}.",
)


class _Parts:
    """What stands in the braces of a layout: every mention of a part draws anew."""

    def __init__(self, drawn: random.Random, words: Sequence[str]) -> None:
        self._drawn, self._words = drawn, words

    def __getitem__(self, part: str | int) -> str:
        drawn = self._drawn
        if part == "word":
            return drawn.choice(self._words)
        if part == "Word":
            return drawn.choice(self._words).capitalize()
        if part == "name":
            return "".join(drawn.choices(string.ascii_lowercase + string.digits, k=drawn.randrange(6, 13)))
        digits = drawn.randrange(1, 6) if part == "number" else int(part)
        return str(drawn.randrange(10 ** (digits - 1), 10**digits))


def records(seed: int, words: Sequence[str], characters: int) -> str:
    """At least `characters` characters of records, in paragraphs; equal for equal arguments."""
    drawn = random.Random(seed)
    parts, text = _Parts(drawn, words), ""
    while len(text) < characters:
        text += "".join(_filled(drawn.choice(_LAYOUTS), parts) + "\n" for _ in range(drawn.randrange(3, 9))) + "\n"
    return text


def _filled(layout: str, parts: _Parts) -> str:
    pieces = string.Formatter().parse(layout)
    return "".join(before + (parts[part] if part else "") for before, part, _, _ in pieces)
