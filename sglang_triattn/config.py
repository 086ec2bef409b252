"""Settings of one server: the single table that makes the flags, the `Engine` keywords and `/server_info`."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from sglang_triattn.errors import TriAttentionError, quoted, suggestion
from sglang_triattn.kernels.select import SELECTIONS, selection_named
from sglang_triattn.profiles import HELP, METAVAR, complete

ENABLE = "enable_triattention"
SWITCH = "--" + ENABLE.replace("_", "-")
PREFIX = "triattention_"

AGGREGATIONS = ("mean", "max")
BUDGET_SCOPES = ("private", "total")
PROMPTS = ("frozen", "compact")
TURN_INPUTS = ("keep", "compact")
CONVERSATIONS = ("off", "named", "auto")
RECENT_SHARE, VALUE_SHARE = 0.2, 0.8
"""Defaults of `recent` and `value_share`; see `Config`."""
AFTER_UPDATES = ("keep", "measure")
_CHOICES = {
    "selection": SELECTIONS,
    "aggregation": AGGREGATIONS,
    "budget_scope": BUDGET_SCOPES,
    "prompt": PROMPTS,
    "turn_inputs": TURN_INPUTS,
    "conversations": CONVERSATIONS,
    "stats_after_update": AFTER_UPDATES,
}
PREVIOUS_RESPONSE = "previous_response_id"
NAME_FIELDS = ("prompt_cache_key", PREVIOUS_RESPONSE, "session_id", "user")
"""Fields of requests that may name a conversation, in addition to `metadata.KEY` and headers."""
AUTO, LOOK_UPS = "auto", "look-ups"
"""Statistics from the per-user cache, or else measured at launch; with the second, look-up weights too."""

_METADATA_OR_HEADER = re.compile(r"metadata\..+|(?i:x(-[a-z0-9]+)+)")
# Smallest value of each whole-number setting.
LEAST_SHARE, MOST_SHARE = 0.01, 0.9
"""Smallest and largest `keep_share` that is not 0: with more, rounds would evict next to nothing."""
_LEAST = {"budget": 1, "interval": 1, "recent": 0, "sinks": 0, "conversation_ttl": 0, "pressure_budget": 1}


@dataclass(frozen=True)
class Config:
    """What a user sets for one server; lengths are in tokens of one request.

    `keep_share` is the least share of a request's private tokens so far, evicted ones included, that a round keeps: the
    budget is what it keeps of short answers, and grows with long ones.

    With a `recency`, values that choose count less the more newer tokens a row holds, which rounds then keep in order.

    `value_share` is the share of the kept tokens, without the newest, that are chosen by how far their values lie
    from the mean value of the newest tokens.

    Two defaults depend on the other fields, on the model and on its statistics, and are left open here
    (`rounds.rules.complete`): `recent` is RECENT_SHARE of the budget, at most half of `pressure_budget`; with the
    selection "per-layer-head", `value_share` is VALUE_SHARE, or 1 if the statistics hold look-up weights, else 0.
    `turn_inputs` stays open, because a request may ask for another `prompt`: see `keeps_inputs`.

    `profile` only says where values come from: `read_settings` has put them in.

    Raises:
        TriAttentionError: a value has the wrong type or range, or the values contradict one another.
    """

    stats: str = AUTO
    budget: int = 2048
    interval: int = 128
    recent: int | None = None
    selection: str = "per-layer-head"
    aggregation: str = "mean"
    budget_scope: str = "private"
    sinks: int = 4
    prompt: str = "frozen"
    pressure_budget: int | None = None
    conversations: str = "named"
    conversation_ttl: int = 600
    stats_after_update: str = "keep"
    value_share: float | None = None
    rounds_per_step: int | str = AUTO
    profile: str | None = None
    turn_inputs: str | None = None
    name_fields: str | None = None
    keep_share: float = 0
    recency: float = 0

    def __post_init__(self) -> None:
        if not isinstance(self.stats, str) or not self.stats:
            raise TriAttentionError(
                f"{flag('stats')} is {quoted(self.stats)}, but it must be {AUTO}, {LOOK_UPS} or the path of a file "
                "made by `sglang-triattn calibrate`."
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
        newest = self.default_recent if self.recent is None else self.recent
        if newest > self.budget:
            raise _above_budget("recent", self, "the newest tokens are kept within the budget")
        if self.pressure_budget is not None and not newest <= self.pressure_budget <= self.budget:
            raise TriAttentionError(
                f"{flag('pressure_budget')} ({self.pressure_budget}) must lie between {flag('recent')} ({newest}) "
                f"and {flag('budget')} ({self.budget}), because it is what a round keeps when memory runs short."
            )
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices and (getattr(self, name) is not None or _DEFAULTS[name] is not None):
                raise TriAttentionError(
                    f"{flag(name)} is {quoted(getattr(self, name))}, but this version supports only "
                    f"{', '.join(choices)}: use one of these."
                )
        if read_name_fields(self.name_fields) and self.conversations == "off":
            raise TriAttentionError(
                f"{flag('name_fields')} is {quoted(self.name_fields)} and {flag('conversations')} is off, which keeps "
                "no conversations that could have names: leave one of the two out."
            )
        most = self.rounds_per_step
        if most != AUTO and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
            raise TriAttentionError(
                f"{flag('rounds_per_step')} is {quoted(most)}, but it must be {AUTO} or a whole number, at least 0."
            )
        keeps = self.keep_share
        if not is_keep_share(keeps, MOST_SHARE):
            raise TriAttentionError(
                f"{flag('keep_share')} is {quoted(keeps)}, but it must be 0 or a number from {LEAST_SHARE} to "
                f"{MOST_SHARE}."
            )
        self._check_values()

    def _check_values(self) -> None:
        """Refuses what `value_share` or `recency` cannot be, and what weighs values where none could choose."""
        share, power = self.value_share, self.recency
        for name, value in (("value_share", share), ("recency", power)):
            if value is not None and not _is_fraction(value):
                raise TriAttentionError(f"{flag(name)} is {quoted(value)}, but it must be a number from 0 to 1.")
        if share and not selection_named(self.selection).per_layer:
            raise TriAttentionError(
                f"{flag('value_share')} is {share} and {flag('selection')} is {self.selection}, but only where each KV "
                "head of each layer keeps tokens of its own can it choose by its values: add "
                f"{flag('selection')} per-layer-head, or leave {flag('value_share')} out."
            )
        if share != 0 and selection_named(self.selection).per_layer:
            return
        name = "value_share" if share == 0 else "selection"
        for weighs, given in (("recency", power), ("stats", self.fits_lookups)):
            if given:
                raise TriAttentionError(
                    f"{flag(weighs)} is {getattr(self, weighs)} and {flag(name)} is {getattr(self, name)}, but it "
                    "weighs values, which then choose nothing: leave one of the two out."
                )

    @property
    def measures(self) -> bool:
        """Whether a launch measures statistics that it has not kept, instead of reading a file of the user's."""
        return self.stats in (AUTO, LOOK_UPS)

    @property
    def fits_lookups(self) -> bool:
        """Whether the statistics that a launch measures hold look-up weights."""
        return self.stats == LOOK_UPS

    @property
    def weighs_values(self) -> bool:
        """Whether a setting needs values to choose, and so the selection per-layer-head."""
        return bool(self.value_share or self.recency) or self.fits_lookups

    @property
    def keeps_inputs(self) -> bool:
        """Whether the input tokens of a conversation's resumed turns stay; by default where a prompt is frozen."""
        return self.prompt == "frozen" if self.turn_inputs is None else self.turn_inputs == "keep"

    @property
    def default_recent(self) -> int:
        most = self.budget if self.pressure_budget is None else self.pressure_budget // 2
        return max(min(int(RECENT_SHARE * self.budget), most), 1)

    def default_value_share(self, weighed: bool) -> float:
        """Of statistics that hold look-up weights (`weighed`), which were measured choosing alone, or do not."""
        if not selection_named(self.selection).per_layer:
            return 0.0
        return 1.0 if weighed else VALUE_SHARE


def _is_fraction(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= 1


def is_keep_share(value: object, most: float) -> bool:
    """Whether `value` can be the setting `keep_share`, which is at most `most`."""
    return _is_fraction(value) and (value == 0 or LEAST_SHARE <= value <= most)


def is_header(field: str) -> bool:
    """Whether an element of the setting `name_fields` is a header, and not a field."""
    return field.lower().startswith("x-")


def read_name_fields(setting: object) -> tuple[str, ...]:
    """The elements of the setting `name_fields`, in order; none for None.

    Raises:
        TriAttentionError: one is no field or header that could name a conversation.
    """
    if setting is None:
        return ()
    fields = tuple(field.strip() for field in setting.split(",")) if isinstance(setting, str) else ()
    wrong = [field for field in fields if field not in NAME_FIELDS and not _METADATA_OR_HEADER.fullmatch(field)]
    if wrong or not fields:
        raise TriAttentionError(
            f"{flag('name_fields')} has {quoted(wrong[0] if wrong else setting)}, but its elements, with commas "
            f"between them, are {', '.join(NAME_FIELDS)}, metadata.KEY and headers that begin with X-: use these."
        )
    return fields


def _number_or_word(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


@dataclass(frozen=True)
class Option:
    """One flag: its Config field, its type on the command line, and its line in --help."""

    name: str
    parse: Callable[[str], Any]
    metavar: str
    help: str
    default_note: str = ""


OPTIONS = (
    Option(
        "stats",
        str,
        "auto|look-ups|PATH",
        "query statistics of the model: a file made by `sglang-triattn calibrate`, or auto, which takes them from the "
        "user's cache or measures them at launch, or look-ups, which also fits the weights of look-ups then",
    ),
    Option("profile", str, METAVAR, HELP, default_note="none"),
    Option("budget", int, "TOKENS", "tokens of a request that a round keeps"),
    Option(
        "keep_share",
        float,
        "SHARE",
        "least share of a request's private tokens so far that a round keeps, from 0.01 to 0.9, or 0: the budget grows "
        "with the answer, and so does the memory of a request",
    ),
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
        "share of the kept tokens, without the newest, that are chosen by how far their values lie from the newest "
        "tokens' mean, per layer and KV head, from 0 to 1; needs the selection per-layer-head",
        default_note=f"{VALUE_SHARE} with the selection per-layer-head, or 1 if the statistics have look-up weights; "
        "else 0; 0 for latent KV",
    ),
    Option(
        "recency",
        float,
        "POWER",
        "power, from 0 to 1, of the number of newer tokens in the row by which values are divided where they choose; "
        "with one, rounds keep rows in order, which copies more K/V",
    ),
    Option(
        "rounds_per_step",
        _number_or_word,
        "auto|N",
        "most compaction rounds of one step: while more requests run, first rounds come early where more would meet or "
        "where they can join others (auto: 8, or more where many requests run); 0: all rounds run when they are due",
    ),
    Option("aggregation", str, "HOW", "how the scores of the 17 future offsets become one: mean or max"),
    Option(
        "budget_scope",
        str,
        "SCOPE",
        "what the budget counts: private (the frozen prefix comes on top) or total (the prefix counts too, as in the "
        "paper; at least the recent tokens stay)",
    ),
    Option("sinks", int, "TOKENS", "first tokens of a request that are never evicted at any score"),
    Option(
        "prompt",
        str,
        "frozen|compact",
        "what happens to a prompt: frozen (all of it stays, and is shared through the radix tree) or compact (only the "
        "part that the tree held already stays; the rest is private and compacted like generated tokens, also while "
        "it is prefilled)",
    ),
    Option(
        "turn_inputs",
        str,
        "keep|compact",
        "what happens to the new input tokens of a conversation's resumed turns (messages, tool results): keep (all of "
        "them stay, on top of the budget) or compact (they are compacted like generated tokens)",
        default_note="keep with frozen prompts, else compact",
    ),
    Option(
        "pressure_budget",
        int,
        "TOKENS",
        "tokens of a request that a round keeps when the pool is full, before SGLang retracts anyone",
        default_note="the budget",
    ),
    Option(
        "conversations",
        str,
        "off|named|auto",
        "which compressed rows wait for a next turn: none (off), those of requests that name a conversation (named), "
        "or also those of all other finished requests, found again by their tokens (auto)",
    ),
    Option(
        "conversation_ttl",
        int,
        "SECONDS",
        "how long the compressed row of a conversation waits for its next turn before it may be dropped",
    ),
    Option(
        "name_fields",
        str,
        "FIELDS",
        f"where the name of a request's conversation is looked for if it gives none: {', '.join(NAME_FIELDS)}, "
        "metadata.KEY or headers that begin with X-, with commas between them; the first that has a name counts",
        default_note="none",
    ),
    Option(
        "stats_after_update",
        str,
        "keep|measure",
        "what happens to the query statistics when the weights of a running server are updated: keep (they stay) or "
        "measure (they are measured again once an update has flushed the cache)",
    ),
)

_DEFAULTS = {field.name: field.default for field in dataclasses.fields(Config)}


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
    if config.sinks > max(config.budget, Config.sinks):
        raise _above_budget("sinks", config, "they stay on top of what rounds keep")
    return config


def _above_budget(name: str, config: Config, why: str) -> TriAttentionError:
    return TriAttentionError(
        f"{flag(name)} ({getattr(config, name)}) is greater than {flag('budget')} ({config.budget}), but {why}: lower "
        "the one or raise the other."
    )
