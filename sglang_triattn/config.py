"""Settings of one server: the single table behind the flags, the `Engine` keywords and `/server_info`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from sglang_triattn.errors import TriAttentionError, quoted, suggestion
from sglang_triattn.kernels.select import SELECTIONS
from sglang_triattn.profiles import HELP, METAVAR, complete

ENABLE = "enable_triattention"
SWITCH = "--" + ENABLE.replace("_", "-")
PREFIX = "triattention_"

AGGREGATIONS = ("mean", "max")
BUDGET_SCOPES = ("private", "total")
PROMPTS = ("frozen", "compact")
RECENT_SHARE, VALUE_SHARE = 0.2, 0.8
"""Defaults of `recent` and `value_share`; see `Config`."""
AFTER_UPDATES = ("keep", "measure")
_CHOICES = {
    "selection": SELECTIONS,
    "aggregation": AGGREGATIONS,
    "budget_scope": BUDGET_SCOPES,
    "prompt": PROMPTS,
    "stats_after_update": AFTER_UPDATES,
}
AUTO = "auto"
"""Statistics from the per-user cache, or else measured at launch."""

# Smallest value of each whole-number setting.
_LEAST = {"budget": 1, "interval": 1, "recent": 0, "sinks": 0, "conversation_ttl": 0, "pressure_budget": 1}


@dataclass(frozen=True)
class Config:
    """Settings of one server; lengths are in tokens of one request.

    `value_share` is the share of the kept tokens, apart from the newest, that are chosen by how far their values lie
    from the mean value of the newest tokens.

    Two defaults depend on the other fields, and neither is None once a Config is built: `recent` is RECENT_SHARE of the
    budget, at most half of `pressure_budget`; `value_share` is VALUE_SHARE with the selection "per-layer-head", else 0,
    and always 0 where the model has latent KV (`latents.for_latents`).

    Some fields are not settings but facts of a model and its server: `window`, the most tokens that a query of a window
    layer sees (0 without such layers, see `for_windows`); `round_to`, of which the tokens that a round evicts are a
    multiple (else 1, see also `plan.in_whole_pages`); `images`, whether requests with images may be compressed.

    `profile` only says where values come from: `read_settings` has put them in.

    Raises:
        TriAttentionError: a value has the wrong type or range, or the values contradict one another.
    """

    stats: str = AUTO
    budget: int = 2048
    interval: int = 128
    recent: int = cast("int", None)  # derived from the other fields unless given
    selection: str = "per-layer-head"
    aggregation: str = "mean"
    budget_scope: str = "private"
    sinks: int = 4
    prompt: str = "frozen"
    pressure_budget: int | None = None
    conversation_ttl: int = 600
    stats_after_update: str = "keep"
    value_share: float = cast("float", None)  # likewise
    profile: str | None = None
    window: int = 0
    round_to: int = 1
    images: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.stats, str) or not self.stats:
            raise TriAttentionError(
                f"{flag('stats')} is {quoted(self.stats)}, but it must be {AUTO} or the path of a file made by "
                "`sglang-triattn calibrate`."
            )
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is None and _DEFAULTS[name] is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise TriAttentionError(
                    f"{flag(name)} is {quoted(value)}, but it must be a whole number of "
                    f"{'seconds' if name == 'conversation_ttl' else 'tokens'}, at least {least}."
                )
        if self.recent is None:
            object.__setattr__(self, "recent", self._default_recent)
        if self.value_share is None:
            object.__setattr__(self, "value_share", VALUE_SHARE if self.selection == "per-layer-head" else 0.0)
        if self.recent > self.budget:
            raise _above_budget("recent", self, "the newest tokens are kept within the budget")
        if self.pressure_budget is not None and not self.recent <= self.pressure_budget <= self.budget:
            raise TriAttentionError(
                f"{flag('pressure_budget')} ({self.pressure_budget}) must lie between {flag('recent')} ({self.recent}) "
                f"and {flag('budget')} ({self.budget}), because it is what a round keeps when memory runs short."
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise TriAttentionError(
                    f"{flag(name)} is {quoted(getattr(self, name))}, but this version supports only "
                    f"{', '.join(choices)}: use one of these."
                )
        share = self.value_share
        if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0 <= share <= 1:
            raise TriAttentionError(f"{flag('value_share')} is {quoted(share)}, but it must be a number from 0 to 1.")
        if share and self.selection != "per-layer-head":
            raise TriAttentionError(
                f"{flag('value_share')} is {share} and {flag('selection')} is {self.selection}, but only where each KV "
                "head of each layer keeps tokens of its own can it choose by its values: add "
                f"{flag('selection')} per-layer-head, or leave {flag('value_share')} out."
            )

    @property
    def _default_recent(self) -> int:
        most = self.budget if self.pressure_budget is None else self.pressure_budget // 2
        return max(min(int(RECENT_SHARE * self.budget), most), 1)

    def for_windows(self, window: int, page_size: int) -> Config:
        """The settings for a model some of whose layers attend to a sliding window.

        A window layer counts its tokens along the row, so the newest `window` tokens must stay, in order. Rounds keep
        at least as many and, at page sizes above 1, evict whole pages, so that they never have to copy those tokens.

        Args:
            window: most tokens that a query of such a layer sees.
            page_size: slots per page.

        Raises:
            TriAttentionError: the budget or the recent tokens are fewer than the window.
        """
        recent = max(self.recent, window) if self.recent == self._default_recent else self.recent
        for name, value in (("budget", self.budget), ("recent", recent)):
            if value < window:
                raise TriAttentionError(
                    f"{flag(name)} is {value}, but some layers of this model attend to a sliding window of {window} "
                    f"tokens, and a round must keep that many of the newest: use at least {window}."
                )
        return dataclasses.replace(self, recent=recent, window=window, round_to=page_size)

    def budget_for(self, frozen: int) -> int:
        """Private tokens that a round keeps for a request with `frozen` frozen ones: at least `recent`, never 0.

        Up to `round_to` - 1 more stay if the private tokens do not divide evenly.
        """
        budget = self.budget if self.budget_scope == "private" else max(self.budget - frozen, self.recent, 1)
        # The page in which the newest tokens begin is never emptied.
        return max(budget, self.recent + self.round_to - 1)

    def trigger(self, frozen: int) -> int:
        """Private tokens at which a round is due for a request with `frozen` frozen ones."""
        return self.budget_for(frozen) + max(self.interval, self.round_to)

    def under_pressure(self) -> Config:
        """Settings for a round that runs because memory is short."""
        if self.pressure_budget is None:
            return self
        return dataclasses.replace(self, budget=self.pressure_budget, pressure_budget=None)


@dataclass(frozen=True)
class Option:
    """One flag: its Config field, its type on the command line, and its line in --help."""

    name: str
    parse: type
    metavar: str
    help: str
    default_note: str = ""


OPTIONS = (
    Option(
        "stats",
        str,
        "auto|PATH",
        "query statistics of the model: a file made by `sglang-triattn calibrate`, or auto, which takes them from the "
        "user's cache or measures them at launch",
    ),
    Option("profile", str, METAVAR, HELP, default_note="none"),
    Option("budget", int, "TOKENS", "tokens of a request that a round keeps"),
    Option("interval", int, "TOKENS", "tokens that a request may grow past the budget before a round"),
    Option(
        "recent",
        int,
        "TOKENS",
        "newest tokens of a request that a round always keeps, within the budget",
        default_note="a fifth of the budget, at most half the pressure budget",
    ),
    Option(
        "selection",
        str,
        "MODE",
        "how scores become kept tokens: one set for all heads, by the mean (shared-mean) or the maximum (union) over "
        "layers and heads, or one set for each KV head (per-head), or for each layer and KV head (per-layer-head)",
    ),
    Option(
        "value_share",
        float,
        "SHARE",
        "share of the kept tokens besides the newest that are chosen by how far their values lie from the newest "
        "tokens' mean, per layer and KV head, from 0 to 1; needs the selection per-layer-head",
        default_note=f"{VALUE_SHARE} with the selection per-layer-head, else 0; 0 for latent KV",
    ),
    Option("aggregation", str, "HOW", "how the scores of the 17 future offsets become one: mean or max"),
    Option(
        "budget_scope",
        str,
        "SCOPE",
        "what the budget counts: private (the frozen prefix comes on top) or total (the prefix counts too, as in the "
        "paper; at least the recent tokens stay)",
    ),
    Option("sinks", int, "TOKENS", "first tokens of a request that are never evicted, whatever their score"),
    Option(
        "prompt",
        str,
        "frozen|compact",
        "what happens to a prompt: frozen (all of it stays, and is shared through the radix tree) or compact (only the "
        "part that the tree held already stays; the rest is private and compacted like generated tokens, also while "
        "it is prefilled)",
    ),
    Option(
        "pressure_budget",
        int,
        "TOKENS",
        "tokens of a request that a round keeps when the pool is full, before SGLang retracts anyone",
        default_note="the budget",
    ),
    Option(
        "conversation_ttl",
        int,
        "SECONDS",
        "how long the compressed row of a conversation waits for its next turn before it may be dropped",
    ),
    Option(
        "stats_after_update",
        str,
        "keep|measure",
        "what happens to the query statistics when the weights of a running server are updated: keep (they stay) or "
        "measure (they are measured again once an update has flushed the cache)",
    ),
)

_FACTS = ("window", "round_to", "images")
_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config) if field.name not in _FACTS}


def flag(name: str) -> str:
    """The command-line flag of a Config field."""
    return "--" + (PREFIX + name).replace("_", "-")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --enable-triattention and one flag for each field of Config to `parser`."""
    group = parser.add_argument_group("TriAttention KV-cache compression")
    group.add_argument(
        SWITCH,
        action="store_true",
        help="Evict the least important private tokens of decoding requests and give their KV slots back.",
    )
    for option in OPTIONS:
        default = _DEFAULTS[option.name]
        shown = f" (default: {'' if default is None else default}{option.default_note})"
        # The default is None so that a flag given without --enable-triattention is noticed.
        group.add_argument(
            flag(option.name),
            type=option.parse,
            metavar=option.metavar,
            help=option.help[0].upper() + option.help[1:] + shown + ".",
        )


def read_settings(values: Mapping[str, Any]) -> Config | None:
    """Reads a Config from argument names and values; None if compression is not enabled.

    Args:
        values: `vars()` of a parsed command line, or the keywords of `sglang.Engine`; other names are ignored.

    Raises:
        TriAttentionError: a `triattention_*` value is wrong, unknown, or given without `enable_triattention`.
    """
    enabled = values.get(ENABLE, False)
    if not isinstance(enabled, bool):
        raise TriAttentionError(f"{ENABLE} is {enabled!r}, but it must be True or False.")
    given = {
        name.removeprefix(PREFIX): value
        for name, value in values.items()
        if name.startswith(PREFIX) and value is not None
    }
    unknown = sorted(given.keys() - _DEFAULTS.keys())
    if unknown:
        wrong, known = PREFIX + unknown[0], [PREFIX + name for name in _DEFAULTS]
        named = f"{wrong} is not a setting; the settings are {', '.join(known)}"
        raise TriAttentionError(f"{named}: {suggestion(wrong, known)}")
    if not enabled:
        if given:
            raise TriAttentionError(
                f"{flag(min(given))} has no effect without --enable-triattention: add that flag, or leave this out."
            )
        return None
    config = Config(**complete(given))
    # A server's: a request may ask for a budget below them. The default is few enough for any budget.
    if config.sinks > max(config.budget, cast("int", _DEFAULTS["sinks"])):
        raise _above_budget("sinks", config, "they stay on top of what rounds keep")
    return config


def _above_budget(name: str, config: Config, why: str) -> TriAttentionError:
    return TriAttentionError(
        f"{flag(name)} ({getattr(config, name)}) is greater than {flag('budget')} ({config.budget}), but {why}: lower "
        "the one or raise the other."
    )
