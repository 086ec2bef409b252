"""What the quality benchmark compares, by name: `dense`, `default`, selections, controls, and any settings.

A selection name means the server's scores alone, with no share for large values. Fields of Config may follow a name:
`value-norm:recent=0`, `settings:selection=per-layer-head,recent=0.25`. Fields that are not given are what a server
derives when started with only the budget. A number between 0 and 1 for a field that counts tokens, such as `recent`, is
a share of the budget. `early=96` has the first round come 96 tokens early, as it may where a server levels rounds.
`weights=no` leaves out the look-up weights that statistics may hold.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from benchmarks.quality.policies import CONTROLS, Control, RowFacts
from benchmarks.quality.redrawn import REDRAWN_CONTROLS
from benchmarks.quality.value_policies import VALUE_CONTROLS
from sglang_triattn.config import ENABLE, PREFIX, SELECTIONS, Config, read_settings
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.rounds.level import earliest
from sglang_triattn.rounds.plan import frozen_length
from sglang_triattn.rounds.rules import complete
from sglang_triattn.rounds.scoring import build_scorer
from sglang_triattn.stats.query_stats import QueryStats
from sglang_triattn.transformers_cache.policy import Policy, Pools, Setting

DENSE, DEFAULT, SETTINGS, EARLY, WEIGHTS = "dense", "default", "settings", "early", "weights"
_CONTROLS = {**CONTROLS, **REDRAWN_CONTROLS, **VALUE_CONTROLS}
ALL = (DENSE, DEFAULT, *SELECTIONS, *_CONTROLS)
USUAL = tuple(name for name in ALL if name not in VALUE_CONTROLS)
"""The server's own choices, and all controls but combinations with the value criterion."""
# More tokens than any stream has.
_UNLIMITED = Config(budget=1 << 40, recent=0)
# The benchmark sets the first and takes the second from --stats.
_TAKEN = ("budget", "rounds_per_step", "stats")


class ChoiceError(ValueError):
    """No choice goes by this name; the message is one sentence for the user."""


@dataclass(frozen=True)
class Choice:
    """One thing to compare.

    Attributes:
        name: as the user wrote it.
        control: None if the server's own scorer decides.
        fields: Config's fields by name, as text.
        early: tokens by which the first round comes early.
        weighed: whether look-up weights decide where the statistics hold some.
    """

    name: str
    control: type[Control] | None
    fields: tuple[tuple[str, str], ...] = ()
    early: int = 0
    weighed: bool = True

    @property
    def scores(self) -> bool:
        """Whether the choice needs the model's statistics."""
        return self.control is None and self.name != DENSE

    @property
    def looks_up(self) -> bool:
        """Whether the choice needs the weights of `look-ups`."""
        return self.control is not None and self.control.needs_lookups

    @property
    def reads_again(self) -> bool:
        """Whether the choice needs a second reading of the whole text."""
        return self.control is not None and self.control.needs_second_reading

    @property
    def foresees(self) -> bool:
        """Whether the choice needs what later queries attend to."""
        return self.control is not None and self.control.needs_foresight

    def config(self, budget: int, interval: int | None) -> Config:
        """The settings at a budget in tokens; an `interval` of None means the server's.

        Raises:
            ChoiceError: the settings contradict one another.
        """
        if self.name == DENSE:
            return _UNLIMITED
        given: dict[str, Any] = {"budget": budget} | ({} if interval is None else {"interval": interval})
        given |= {name: _value(self.name, name, text, budget) for name, text in self.fields}
        try:
            config = read_settings({ENABLE: True, **{PREFIX + name: value for name, value in given.items()}})
        except TriAttentionError as error:
            raise ChoiceError(f"{self.name} cannot be used: {error}") from error
        most = config.interval - earliest(config.interval)
        if self.early > most:
            raise ChoiceError(
                f"{self.name} cannot be used: with an interval of {config.interval}, {EARLY} is at most {most}."
            )
        return config

    def setting(self, config: Config, row: RowFacts) -> Setting:
        """What a row of a CompactedCache needs; equal for equal scorers, so that rows are computed once."""
        if self.name == DENSE:
            return Setting(config, _never)
        make = None if self.control is None else partial(_make, self.control, row)
        if make is None and not self.weighed:
            make = partial(_unweighed, config, row)
        return Setting(config, make, self.early)


def frozen_of(config: Config, prompt_length: int) -> int:
    """First entry of a row that a round may touch if no tree holds the prompt and pages hold one token."""
    return frozen_length(complete(config), 0, prompt_length, 1)


def read_choice(text: str) -> Choice:
    """Reads the choice that a name stands for.

    Raises:
        ChoiceError: the name or one of its fields is unknown.
    """
    head, colon, rest = text.partition(":")
    if head not in (*ALL, SETTINGS) or (head == DENSE and colon):
        raise ChoiceError(
            f"There is no policy {text!r}: use {', '.join(ALL)}, or {SETTINGS}:FIELD=VALUE,... with fields of the "
            "server's settings."
        )
    # Scores alone decide.
    fields: dict[str, str] = {"selection": head, "value_share": "0"} if head in SELECTIONS else {}
    early, weighed = 0, True
    known = [field.name for field in dataclasses.fields(Config) if field.name not in _TAKEN]
    for entry in rest.split(",") if colon else ():
        name, equals, value = entry.partition("=")
        if name == EARLY and value.isdecimal():
            early = int(value)
            continue
        if entry == f"{WEIGHTS}=no":
            weighed = False
            continue
        if not equals or name not in known:
            raise ChoiceError(
                f"{entry!r} in {text!r} is not FIELD=VALUE with a field of {', '.join((*known, EARLY, WEIGHTS))}."
            )
        fields[name] = value
    choice = Choice(text, _CONTROLS.get(head), tuple(fields.items()), early, weighed)
    choice.config(64, None)
    return choice


def _value(choice: str, name: str, text: str, budget: int) -> Any:
    """`text` converted to the type that Config gives the field."""
    kind = next(field.type for field in dataclasses.fields(Config) if field.name == name)
    if kind.startswith("str"):
        return text
    if kind == "bool":
        return {"true": True, "false": False}.get(text, text)
    try:
        number = float(text)
    except ValueError:
        raise ChoiceError(f"{name}={text} in {choice!r} is not a number.") from None
    if kind.startswith("float"):
        return number
    if 0 < number < 1:
        return round(number * budget)
    return int(number) if number.is_integer() else number


def _make(control: type[Control], row: RowFacts, pools: Pools) -> Policy:
    return control(pools, row)


def _unweighed(config: Config, row: RowFacts, pools: Pools) -> Policy:
    stats, context = dataclasses.replace(cast(QueryStats, row.stats), lookups=None), len(pools.k_buffers[0])
    return build_scorer(complete(config), stats, pools.k_buffers, pools.v_buffers, context=context)


def _never(pools: Pools) -> Policy:
    """The policy of rows that no round ever touches."""
    return None
