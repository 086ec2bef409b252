"""The host-side plan of a compaction round: who is compacted, when, and how far.

The row of one request:

    0            protected        first slot kept          new physical length        old physical length
    |-- frozen ---|------------- private, kept -----------------|------ evicted, freed -------|
    tree-owned     K/V rotated at their own logical positions     back in the allocator
    never written  positions of new tokens = logical length

A plan depends only on token counts and settings. No tensor is read, so every tensor-parallel rank makes the same plan
and nothing waits for the device.
"""

from __future__ import annotations

import dataclasses
from dataclasses import asdict, dataclass

from sglang_triattn.config import SWITCH, flag
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.rounds.inputs import NO_INPUTS, Stretch, TurnInputs, ceil_align
from sglang_triattn.rounds.rules import RoundRules


@dataclass(frozen=True)
class Plan:
    """One round of one request. Lengths are KV entries of its row.

    Attributes:
        frozen: first private position of the row, a multiple of the page size.
        old_length: physical length before the round.
        new_length: physical length after it.
        next_position: logical length, i.e. how many tokens stand before the request's next one. It is that token's RoPE
            position, except after images with several position axes.
        freed_slots: slots returned to the allocator, whole pages at page sizes above 1.
        moved: stretches of the row, input tokens of resumed turns, that move to directly before `frozen` first, see
            `rounds.inputs`.
        newest: at least as many of the newest tokens stay, in order, because others of those input tokens are among
            them; 0 if none are.
    """

    frozen: int
    old_length: int
    new_length: int
    next_position: int
    freed_slots: int
    moved: tuple[Stretch, ...] = ()
    newest: int = 0

    @property
    def private_length(self) -> int:
        return self.old_length - self.frozen

    @property
    def kept_private(self) -> int:
        return self.new_length - self.frozen

    @property
    def evicted_tokens(self) -> int:
        return self.old_length - self.new_length

    @property
    def moved_len(self) -> int:
        """Entries in `moved`."""
        return sum(stop - start for start, stop in self.moved)

    @property
    def target(self) -> int:
        """Where `moved` go: entries before it stay as they are."""
        return self.frozen - self.moved_len

    def inputs_after(self, inputs: TurnInputs) -> TurnInputs:
        """Where the input tokens of resumed turns lie after the round; `inputs` as before it."""
        return inputs.after_round(self.target, self.old_length - self.newest, self.moved_len, self.evicted_tokens)


@dataclass(frozen=True)
class Report:
    """`meta_info["triattention"]` of a finished request; lengths in tokens.

    `rounds`, `evicted_tokens` and `freed_slots` are those of this request alone, of which the server's sums are made.
    `logical_length` counts the tokens whose K/V was computed (the last sampled token has none), `physical_length` those
    still held; the difference is what was evicted from the row. For a request that names a conversation, that may be
    more than `evicted_tokens`: `conversation_evicted_tokens` counts earlier turns too. `conversation` says how it
    started (new, resumed, lost or diverged) and `conversation_kept` whether its row waits for the next turn.
    `protected_length` counts the entries after the frozen ones that no round touches because they are input tokens of
    resumed turns, in whole pages.
    """

    rounds: int
    evicted_tokens: int
    freed_slots: int
    frozen_length: int
    physical_length: int
    logical_length: int
    conversation: str | None = None
    conversation_kept: bool | None = None
    conversation_evicted_tokens: int | None = None
    protected_length: int | None = None

    def to_dict(self) -> dict[str, int | str | bool]:
        """The fields that apply."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def frozen_length(rules: RoundRules, protected: int, prompt_length: int, page_size: int) -> int:
    """First position of a row that a round may touch.

    The tree owns [0, protected), and the first tokens (attention sinks) always stay. A frozen prompt also stays where
    the tree does not hold it (radix cache off, or a prompt withheld from the tree), except for its last, partly filled
    page, which it shares with generated tokens.
    """
    if rules.prompt == "compact":
        return max(protected, rules.sinks)
    return max(protected, rules.sinks, prompt_length - prompt_length % page_size)


def max_kv_tokens(
    rules: RoundRules,
    *,
    frozen: int,
    logical_end: int,
    evicted_before: int = 0,
    page_size: int = 1,
    inputs: TurnInputs = NO_INPUTS,
) -> int:
    """Most KV entries that a decoding request ever holds.

    A round runs before any step that would take the row past its trigger.

    Args:
        frozen, evicted_before, page_size, inputs: as for `plan_round`.
        logical_end: most tokens that the request computes, prompt included, less those evicted before.
    """
    rules = _rules_with(rules, inputs, page_size)
    kept = _kept_at_most(frozen, page_size, inputs)
    return min(kept + rules.most_private(kept, logical_end - kept + evicted_before), logical_end)


def plan_round(
    rules: RoundRules,
    *,
    frozen: int,
    length: int,
    evicted_before: int,
    page_size: int,
    inputs: TurnInputs = NO_INPUTS,
) -> Plan | None:
    """Plans the round that is due for a request; None if none is.

    Args:
        frozen: from `frozen_length`.
        length: physical length now, in KV entries.
        evicted_before: tokens evicted by earlier rounds of this row.
        page_size: slots per page.
        inputs: input tokens of resumed turns, which stay on top of the budget.
    """
    return plan_eviction(
        rules,
        frozen=frozen,
        length=length,
        evicted_before=evicted_before,
        page_size=page_size,
        inputs=inputs,
        only_due=True,
    )


def plan_eviction(
    rules: RoundRules,
    *,
    frozen: int,
    length: int,
    evicted_before: int,
    page_size: int,
    inputs: TurnInputs = NO_INPUTS,
    only_due: bool = False,
) -> Plan | None:
    """Plans a round down to the budget; None if the row is within it, or with `only_due` if none is due.

    Other arguments as for `plan_round`.
    """
    rules = _rules_with(rules, inputs, page_size)
    first = inputs.target(frozen, page_size)
    kept = first + inputs.waiting_len(first, length)
    if only_due and length - kept < rules.trigger(kept, evicted_before):
        return None
    excess = length - kept - rules.budget_for(kept, length - kept + evicted_before)
    new_length = length - excess // rules.round_to * rules.round_to
    if length <= new_length:
        return None
    # Where windows are counted along the row, the newest tokens do not move; nor does a page that is not full.
    still = length - rules.recent if rules.window else length
    still = max(still - still % page_size, first) if inputs else length
    moved = inputs.waiting_in(first, still)
    start = first + sum(stop - begin for begin, stop in moved)
    return Plan(
        frozen=start,
        old_length=length,
        new_length=new_length,
        next_position=length + evicted_before,
        freed_slots=ceil_align(length, page_size) - ceil_align(new_length, page_size),
        moved=moved,
        newest=length - still if kept > start else 0,
    )


def due_length(
    rules: RoundRules, *, frozen: int, page_size: int, evicted_before: int = 0, inputs: TurnInputs = NO_INPUTS
) -> int:
    """Entries of a row at which a round is due; arguments as for `plan_round`."""
    kept = _kept_at_most(frozen, page_size, inputs)
    return kept + _rules_with(rules, inputs, page_size).trigger(kept, evicted_before)


def _kept_at_most(frozen: int, page_size: int, inputs: TurnInputs) -> int:
    """Entries of a row, frozen ones and input tokens of resumed turns, of which no round evicts any."""
    first = inputs.target(frozen, page_size)
    return first + inputs.all_waiting_len(first)


def _rules_with(rules: RoundRules, inputs: TurnInputs, page_size: int) -> RoundRules:
    """The rules for a row with these input tokens, whose pages stay in their places only if whole pages go."""
    return dataclasses.replace(rules, round_to=page_size) if inputs and rules.round_to < page_size else rules


def first_round(rules: RoundRules) -> int:
    """Fewest tokens, prompt included, of a request that can have a round: of one whose sinks alone are frozen."""
    if rules.pressure_budget is not None:
        return rules.sinks + rules.under_pressure().budget_for(rules.sinks) + 1
    return rules.sinks + rules.trigger(rules.sinks)


def check_reach(rules: RoundRules, most: int, what: str) -> None:
    """Raises TriAttentionError if no request can get as long as its first round needs.

    Args:
        most: tokens that a request can have.
        what: what limits them, to complete "but ... N tokens".
    """
    first = first_round(rules)
    if first >= most:
        sinks = f", sinks {rules.sinks}" if rules.sinks else ""
        raise TriAttentionError(
            f"A request has its first round at {first} tokens or more ({flag('budget')} {rules.budget}, interval "
            f"{rules.interval}{sinks}), but {what} {most} tokens, so that none would ever be compressed: lower "
            f"{flag('budget')}, or start without {SWITCH}."
        )


def scored_tokens(rules: RoundRules, context: int) -> tuple[int, int]:
    """Private tokens of a request at a round: (usual number, maximum), for a model with this context limit.

    There are more than usual when output was prefilled again after a retraction.
    """
    due = rules.budget + rules.interval
    return due, max(due, context)


def most_kept(rules: RoundRules, context: int) -> int:
    """Most private tokens that a round leaves, for a model with this context limit; a request can only lower it."""
    return rules.budget_for(0, context) + 2 * (rules.round_to - 1)


@dataclass
class Totals:
    """Sums over all requests since the server started.

    Attributes:
        pressure_rounds: those of `rounds` that ran early.
        failed_rounds: rounds that failed; not among `rounds`.
        moved_bytes: bytes of K/V that rounds copied, at most: a token that stays where it is may be among them. Counted
            by servers alone.
    """

    rounds: int = 0
    evicted_tokens: int = 0
    freed_slots: int = 0
    pressure_rounds: int = 0
    failed_rounds: int = 0
    moved_bytes: int = 0

    def add(self, plan: Plan, moved_bytes: int = 0) -> None:
        self.rounds += 1
        self.evicted_tokens += plan.evicted_tokens
        self.freed_slots += plan.freed_slots
        self.moved_bytes += moved_bytes
