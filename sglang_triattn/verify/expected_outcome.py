"""What a server's rounds must have done to a request, from its settings and token counts alone.

Servers act after `sglang_triattn.rounds.plan`, of which this is independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from sglang_triattn.rounds.rules import RoundRules


@dataclass(frozen=True)
class Outcome:
    """What rounds did to one request, in tokens and KV slots."""

    rounds: int = 0
    evicted_tokens: int = 0
    freed_slots: int = 0
    physical_length: int = 0


def frozen_length(config: RoundRules, prompt: int, cached: int, page_size: int) -> int:
    """First KV entry that rounds may touch.

    Args:
        prompt: its tokens.
        cached: as many of them as the radix tree held.
    """
    whole_pages = prompt // page_size * page_size if config.prompt == "frozen" else 0
    return max(cached, config.sinks, whole_pages)


def replay(config: RoundRules, *, prompt: int, frozen: int, logical: int, page_size: int) -> Outcome:
    """The outcome for a request that ran alone, and was neither retracted nor compacted while it was prefilled.

    The step after the prefill comes before any round; from then on, a round runs before every step that finds
    `trigger` private entries.

    Args:
        prompt: its tokens.
        frozen: from `frozen_length`.
        logical: tokens whose K/V was computed.
        page_size: slots per page; floor law: a round frees the pages past the row's new end.
    """
    return next(_outcomes(config, config.trigger(frozen), prompt, frozen, logical, page_size))


def possible(config: RoundRules, *, prompt: int, frozen: int, logical: int, page_size: int) -> set[Outcome]:
    """The outcomes for a request that ran together with others: its first round may have come early.

    The server may look at it once more after its last token, before it knows that this was the last.

    Args: as for `replay`.
    """
    kept, trigger = config.budget_for(frozen), config.trigger(frozen)
    firsts = range(min(kept, trigger - config.interval) + max(config.interval // 4, 1), trigger + 1)
    return {each for first in firsts for each in _outcomes(config, first, prompt, frozen, logical, page_size)}


def _outcomes(
    config: RoundRules, first: int, prompt: int, frozen: int, logical: int, page_size: int
) -> Iterator[Outcome]:
    """The outcome if the first round finds `first` private entries, and the one with a round after the last token."""
    due, outcome = first, Outcome(physical_length=min(prompt + 1, logical))

    def is_due() -> bool:
        return outcome.physical_length - frozen >= due

    def after_round() -> Outcome:
        length = outcome.physical_length
        private = length - frozen
        kept = config.budget_for(frozen, private + outcome.evicted_tokens)
        excess = (private - kept) // config.round_to * config.round_to
        freed = (pages(length, page_size) - pages(length - excess, page_size)) * page_size
        return Outcome(
            outcome.rounds + 1, outcome.evicted_tokens + excess, outcome.freed_slots + freed, length - excess
        )

    while outcome.physical_length + outcome.evicted_tokens < logical:
        if is_due():
            outcome = after_round()
            due = config.trigger(frozen, outcome.evicted_tokens)
        outcome = replace(outcome, physical_length=outcome.physical_length + 1)
    yield outcome
    if is_due():
        yield after_round()


def is_possible(config: RoundRules, reported: Outcome, *, prompt: int, frozen: int, logical: int) -> bool:
    """Whether due rounds can have done this to a request whose prompt was compacted, in chunks of any size.

    SGLang makes a chunk as long as there is memory for it, so how many rounds run during a prefill, and how much each
    of them evicts, is known to the server alone. But no round comes before its time, none is left out while the request
    decodes, and each leaves what the budget says.

    Args:
        reported: what the server reports.
        prompt, frozen, logical: as for `replay`; the prompt is longer than what makes a round due.
    """
    kept, unit = config.budget_for(frozen, logical - frozen), config.round_to
    trigger = config.trigger(frozen, reported.evicted_tokens)
    first = config.trigger(frozen)
    grown = first - config.budget_for(frozen, first)
    least = grown // unit * unit  # what a round evicts, or more
    # Tokens from one round to the next.
    spacing = math.ceil((grown + 1) / (1 - config.keep_share)) if config.keep_share else grown
    private, generated = reported.physical_length - frozen, logical - prompt
    return (
        reported.physical_length + reported.evicted_tokens == logical
        and kept <= private <= trigger + unit - 1
        and max((generated + 1) // spacing - 1, 1) <= reported.rounds <= reported.evicted_tokens // least
    )


def pages(length: int, page_size: int) -> int:
    """Pages that hold `length` entries."""
    return -(-length // page_size)


def first_round(config: RoundRules, *, prompt: int, frozen: int) -> int:
    """How many generated tokens the first round cannot have touched."""
    return max(frozen + config.trigger(frozen) - prompt, 1) + 1


def tokens_to_generate(config: RoundRules, *, prompt: int, frozen: int, least: int) -> int:
    """At least `least` tokens, such that no round is due near the request's end.

    A server may look at a request once more after its last token, before it knows that this was the last.
    """

    def rounds(logical: int) -> int:
        return replay(config, prompt=prompt, frozen=frozen, logical=logical, page_size=1).rounds

    near = range(least, least + config.interval)
    return next((tokens for tokens in near if rounds(prompt + tokens - 1) == rounds(prompt + tokens + 1)), least)
