"""What a rule is: a setting of SGLang that is refused, and of which servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from sglang_triattn.compatibility.traits import Traits
from sglang_triattn.config import PREFIX, Config

ASSISTANT = "FROZEN_KV_MTP"
"""SGLang's name for drafts by a model that reads the served model's KV, as Gemma-4's assistants do. It takes EAGLE and
NEXTN for this with such a model."""
BLOCKS = "DFLASH"
"""SGLang's name for drafts by a model that drafts a block of tokens at once from the served model's hidden states."""
DRAFT_MODELS = ("STANDALONE", "EAGLE", "EAGLE3", "NEXTN", ASSISTANT, BLOCKS)
"""Ways of drafting tokens by a model of its own that work with rounds. SGLang takes NEXTN for EAGLE."""
WITHOUT_CONVERSATIONS = "use --triattention-conversations off"


@dataclass(frozen=True)
class Server:
    """What a rule may depend on, in addition to the setting that it refuses.

    Attributes:
        settings: SGLang's settings by field; of a command line, those that were given.
    """

    config: Config
    settings: Mapping[str, Any]
    traits: Traits

    def is_above_one(self, field: str) -> bool:
        return many(self.settings.get(field))

    def value_of(self, name: str) -> object:
        """Of a setting of SGLang, or of this package by its full name."""
        return self.settings[name] if name in self.settings else getattr(self.config, name.removeprefix(PREFIX))

    @property
    def drafts(self) -> str | None:
        """The way of drafting tokens, in capitals; None without speculative decoding."""
        algorithm = self.settings.get("speculative_algorithm")
        return None if algorithm is None else str(algorithm).upper()

    @property
    def has_draft_model(self) -> bool:
        """Whether tokens are drafted by a model, or by a layer of the served one."""
        return self.drafts in DRAFT_MODELS

    @property
    def is_decode_server(self) -> bool:
        return self.settings.get("disaggregation_mode") == "decode"

    @property
    def drafts_in_layers(self) -> bool:
        """Whether SGLang drafts each token with a layer of the model's own, see `Family.layered_drafts`."""
        # Of itself, it does so for EAGLE alone.
        layered = self.settings.get("enable_multi_layer_eagle", self.drafts == "EAGLE")
        return self.traits.layered_drafts and self.drafts in ("EAGLE", "NEXTN") and bool(layered)

    @property
    def drafts_with_states(self) -> bool:
        """Whether tokens are drafted for layers that keep a state instead of KV."""
        return self.traits.linear_states and self.drafts is not None


def is_set(value: object) -> bool:
    return bool(value)


def many(value: int | None) -> bool:
    """Whether a number is above 1."""
    return value is not None and value > 1


def flag(field: str) -> str:
    """The flag of a setting."""
    return "--" + field.replace("_", "-")


def _always(_: Server) -> bool:
    return True


@dataclass(frozen=True)
class Rule:
    """A setting that is refused if `applies(value)`, of the servers for which `when` holds.

    Attributes:
        field: SGLang's name.
        reason: completes "... does not work with ... because".
        remedy: what to do, if not to leave the setting out.
        other: setting, of SGLang or of this package, without which this one would be accepted; shown with its value.
        names_model: whether the message names the model, because with another the setting would be accepted.
    """

    field: str
    applies: Callable[[Any], bool]
    reason: str
    remedy: str = ""
    when: Callable[[Server], bool] = _always
    other: str = ""
    names_model: bool = False

    def refuses(self, server: Server) -> bool:
        settings = server.settings
        return self.field in settings and self.applies(settings[self.field]) and self.when(server)

    def message(self, server: Server) -> str:
        """One sentence for the user."""
        value, name, others = server.settings[self.field], flag(self.field), "--enable-triattention"
        if self.other:
            others = f"{others} and {flag(self.other)} {server.value_of(self.other)}"
        if self.names_model:
            others = f"{others} for {server.traits.name}"
        # A switch has no value of its own.
        shown = name if value is True else f"{name} {value}"
        remedy = self.remedy or f"leave {name} out, or start without --enable-triattention"
        return f"{shown} does not work with {others}, because {self.reason}: {remedy}."


def only(
    rules: tuple[Rule, ...], when: Callable[[Server], bool], other: str = "", *, names_model: bool = False
) -> tuple[Rule, ...]:
    """The rules, for the servers for which `when` holds."""
    return tuple(replace(rule, when=when, other=other, names_model=names_model) for rule in rules)
