"""What one request may ask for: `custom_params={"triattention": {...}}` of its sampling parameters.

The server's flags are the defaults, and for lengths the ceilings: what a client may spend is the operator's decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from sglang_triattn.config import PROMPTS, Config
from sglang_triattn.errors import TriAttentionError

KEY = "triattention"
FIELDS = ("enabled", "budget", "interval", "recent", "prompt")


def read_request(config: Config, custom_params: Mapping[str, Any] | None) -> Config | None:
    """Settings of one request, or None where it asks not to be compressed.

    Args:
        config: the server's settings.
        custom_params: of the request's sampling parameters; other keys than KEY are ignored.

    Raises:
        TriAttentionError: a field is unknown, of the wrong type, or out of range.
    """
    asked = (custom_params or {}).get(KEY)
    if asked is None:
        return config
    if not isinstance(asked, Mapping):
        raise TriAttentionError(f"custom_params.{KEY} is {asked!r}, but it must be an object with {', '.join(FIELDS)}.")
    unknown = sorted(str(name) for name in asked if name not in FIELDS)
    if unknown:
        raise TriAttentionError(
            f"custom_params.{KEY}.{unknown[0]} is not a setting of a request; these are {', '.join(FIELDS)}."
        )
    enabled = asked.get("enabled", True)
    if not isinstance(enabled, bool):
        raise TriAttentionError(f"custom_params.{KEY}.enabled is {enabled!r}, but it must be true or false.")
    budget = _tokens(asked, "budget", 1, config.budget)
    interval = _tokens(asked, "interval", 1, config.interval)
    recent = _tokens(asked, "recent", 0, budget, default=min(config.recent, budget))
    prompt = asked.get("prompt", config.prompt)
    if prompt not in PROMPTS:
        raise TriAttentionError(f"custom_params.{KEY}.prompt is {prompt!r}, but it must be {' or '.join(PROMPTS)}.")
    if not enabled:
        return None
    pressure = config.pressure_budget
    if pressure is not None:
        pressure = max(min(pressure, budget), recent, 1)
    return dataclasses.replace(
        config, budget=budget, interval=interval, recent=recent, prompt=prompt, pressure_budget=pressure
    )


def _tokens(asked: Mapping[str, Any], name: str, least: int, most: int, default: int | None = None) -> int:
    value = asked.get(name, most if default is None else default)
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise TriAttentionError(
            f"custom_params.{KEY}.{name} is {value!r}, but it must be a whole number of tokens from {least} to {most}, "
            f"{'the budget' if name == 'recent' else 'what the server was started with'}."
        )
    return value
