"""What clients may send as custom_params, right and wrong."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import strategies as st

from sglang_triattn.request.options import FIELDS, KEY

NUMBERS = st.one_of(
    st.integers(-3, 140),
    st.integers(),
    # Not drawn as such: hypothesis could not print them.
    st.sampled_from([4299, 5000]).map(lambda digits: 10**digits),
    st.sampled_from([2**63, -(2**63), 2**64, math.nan, math.inf, -math.inf, 1e308, 0.5, 100.0]),
)
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(["frozen", "compact", "\ud800", "x" * 256, "x" * 257, "x" * 100_000, "\n", "\0", "{", "é" * 300]),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {KEY: value}
    return value


LEAVES = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
JUNK = st.one_of(
    LEAVES,
    LEAVES,
    st.lists(LEAVES, max_size=3),
    st.dictionaries(TEXTS, LEAVES, max_size=3),
    st.sampled_from([nested(5), nested(900), [0] * 10_000]),
)
NAMES = st.one_of(st.sampled_from(FIELDS), st.sampled_from(FIELDS), TEXTS)
LIKELY = {
    "enabled": st.booleans(),
    "budget": st.integers(1, 110),
    "interval": st.integers(1, 40),
    "recent": st.integers(0, 110),
    "keep_share": st.floats(0, 1),
    "prompt": st.sampled_from(["frozen", "compact"]),
    "turn_inputs": st.sampled_from(["keep", "compact"]),
    "conversation": st.text(min_size=1, max_size=20),
    "release": st.booleans(),
}


@st.composite
def settings(draw) -> dict:
    """The object under KEY: of each field nothing, something likely or junk, and now and then an unknown field."""
    asked = {}
    for name in draw(st.lists(st.sampled_from(FIELDS), unique=True, max_size=4)):
        asked[name] = draw(LIKELY[name] if draw(st.integers(0, 2)) else JUNK)
    if not draw(st.integers(0, 5)):
        asked[draw(NAMES)] = draw(JUNK)
    return asked


CUSTOM_PARAMS = st.one_of(
    settings().map(lambda asked: {KEY: asked}),
    settings().map(lambda asked: {KEY: asked}),
    JUNK,
    JUNK.map(lambda value: {KEY: value}),
    settings(),
)


def as_json(value: Any) -> bool:
    """Whether a client's JSON library can send it; SGLang's own limits on JSON are not tested here."""
    try:
        json.dumps(value, allow_nan=False).encode()
        return min(numbers(value), default=0) >= -(2**63) and max(numbers(value), default=0) < 2**64
    except (ValueError, RecursionError):
        return False


def numbers(value: Any) -> list[int]:
    """Integers anywhere in it."""
    if isinstance(value, dict):
        return [number for part in value.values() for number in numbers(part)]
    if isinstance(value, list):
        return [number for part in value for number in numbers(part)]
    return [value] if isinstance(value, int) else []
