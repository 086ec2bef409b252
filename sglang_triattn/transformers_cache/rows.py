"""Rows of K/V outside SGLang, each compacted under its own settings as the server compacts a request.

As in the server, every layer has one pool for K and one for V. Row b owns the slots from b * capacity on:

    0            frozen            length             capacity
    |-- frozen ---|---- private ----|------ free -------|
                    compaction rounds keep order: the positions that a head holds always ascend

Rows see the same tokens but may hold different numbers of them. Layers and heads of a row may keep different tokens,
but equally many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from sglang_triattn.config import Config
from sglang_triattn.kernels.compact.reference import list_moves, move_torch
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.rounds.level import earliest
from sglang_triattn.rounds.plan import Plan, Report, Totals, frozen_length, plan_eviction
from sglang_triattn.transformers_cache.policy import CacheError, Policy, Pools, Setting

# Keeps tokens in order, so that the newest are always last.
_STRATEGY = "slide"


class KVRows:
    """The rows and their rounds.

    Args:
        settings: one per row.
        pools: pools of len(settings) * capacity slots.
        capacity: KV entries that a row can hold.
        make_scorer: makes the policy of a row whose setting names none.
        prompt_length: tokens of the prompt, the same for all rows.
        protected: first tokens of the prompt, which a radix tree would own; no round touches them.
        page_size: slots per page; determines where a frozen prompt ends, and how many slots are freed.

    Attributes:
        lengths: KV entries that each row holds.
        totals: what rounds did to each row.
        after_round: unless None, called after each round with the row's number and its plan.

    Raises:
        CacheError: a number is out of range.
    """

    def __init__(
        self,
        settings: Sequence[Setting],
        pools: Pools,
        capacity: int,
        make_scorer: Callable[[Config, Pools], Policy],
        *,
        prompt_length: int,
        protected: int = 0,
        page_size: int = 1,
    ) -> None:
        least = {"capacity": (capacity, 1), "prompt_length": (prompt_length, 1), "page_size": (page_size, 1)}
        for name, (value, bound) in {**least, "protected": (protected, 0)}.items():
            if value < bound:
                raise CacheError(f"{name} is {value}, but it must be at least {bound}.")
        if protected > prompt_length:
            raise CacheError(f"protected is {protected}, but the prompt has only {prompt_length} tokens.")
        for setting in settings:
            most = setting.rules.interval - earliest(setting.rules.interval)
            if not 0 <= setting.early <= most:
                raise CacheError(f"early is {setting.early}, but at this interval it must lie between 0 and {most}.")
        self.settings, self.pools, self.capacity = tuple(settings), pools, capacity
        self.prompt_length, self.protected, self.page_size = prompt_length, protected, page_size
        self.lengths = [0] * len(self.settings)
        self.totals = [Totals() for _ in self.settings]
        self.after_round: Callable[[int, Plan], None] | None = None
        self._make_scorer = make_scorer
        self._policies: dict[Setting, Policy] = {}
        self._mover: Mover | None = None

    def policy_of(self, row: int) -> Policy:
        """The policy of a row; made on first use."""
        setting = self.settings[row]
        if setting not in self._policies:
            make = setting.make_policy
            made = self._make_scorer(setting.config, self.pools) if make is None else make(self.pools)
            self._policies[setting] = made
        return self._policies[setting]

    def logical_length(self, row: int) -> int:
        """Tokens that a row has seen, which is also the position of its next one."""
        return self.lengths[row] + self.totals[row].evicted_tokens

    def frozen(self, row: int) -> int:
        """First entry of a row that a round may touch."""
        return frozen_length(self.settings[row].rules, self.protected, self.prompt_length, self.page_size)

    def slots(self, size: int) -> torch.Tensor:
        """[B, size] int64: slots for the next tokens of each row.

        Raises:
            CacheError: a row would exceed its capacity.
        """
        longest = max(self.lengths)
        if longest + size > self.capacity:
            raise CacheError(
                f"A row holds {longest} KV entries and cannot take {size} more, because the capacity is "
                f"{self.capacity}: build the cache, or branch it, with a greater one."
            )
        starts = torch.tensor([row * self.capacity + length for row, length in enumerate(self.lengths)])
        return (starts[:, None] + torch.arange(size)).to(self.pools.k_buffers[0].device)

    def write(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Stores K and V [B, H_kv, size, head_dim] of one layer at `slots`."""
        buffers = (self.pools.k_buffers[layer], self.pools.v_buffers[layer])
        for buffer, new in zip(buffers, (keys, values), strict=True):
            buffer[slots.flatten()] = new.transpose(1, 2).flatten(0, 1).to(buffer.dtype)

    def advance(self, slots: torch.Tensor, counts: Sequence[int]) -> None:
        """Appends the first `counts[b]` tokens of row b's `slots` to the row, once all layers are written."""
        logical = torch.tensor([self.logical_length(row) for row in range(len(self.lengths))])
        positions = (logical[:, None] + torch.arange(slots.shape[1])).to(slots.device)
        for buffer in self.pools.positions:
            buffer[slots.flatten()] = positions.reshape(-1, 1).expand(-1, buffer.shape[1])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]

    def pieces(self, count: int, chunk: int) -> Iterator[int]:
        """Yields the sizes of pieces that end where the server looks for rounds, and runs due rounds before each.

        Together they make up the next `count` tokens. The caller computes each piece before it takes the next.

        Args:
            chunk: most tokens of a piece; within a prompt, rounds may run between two chunks.
        """
        while count:
            self.run_due_rounds()
            # Rows differ in length only after the prompt.
            done = min(map(self.logical_length, range(len(self.lengths))))
            size = min(count, chunk)
            if done < self.prompt_length:
                ends = [end for end in (self.protected, self.prompt_length) if end > done]
                size = min(size, ends[0] - done)
            else:
                size = min(size, *map(self.until_due, range(len(self.lengths))))
            yield size
            count -= size

    def run_due_rounds(self) -> None:
        """Runs one round for every row that has outgrown its budget."""
        for row in range(len(self.lengths)):
            plan = self.due(row)
            if plan is not None:
                self._compact(row, plan)

    def due(self, row: int) -> Plan | None:
        """Plans the round that the server would run before the row's next token; None if none is due."""
        # The first token after the prompt is computed before the server looks at a request again.
        if self.logical_length(row) == self.prompt_length or self._left(row) > 0:
            return None
        return plan_eviction(
            self.settings[row].rules,
            frozen=self.frozen(row),
            length=self.lengths[row],
            evicted_before=self.totals[row].evicted_tokens,
            page_size=self.page_size,
        )

    def until_due(self, row: int) -> int:
        """Tokens that a row may take before its next round, at least one."""
        return max(self._left(row), 1)

    def _left(self, row: int) -> int:
        """Tokens that a row lacks until its next round is due; 0 or fewer if it is."""
        frozen, setting = self.frozen(row), self.settings[row]
        decodes = self.logical_length(row) >= self.prompt_length
        early = setting.early if decodes and not self.totals[row].rounds else 0
        due = frozen + setting.rules.trigger(frozen, self.totals[row].evicted_tokens)
        return due - early - self.lengths[row]

    def drop_newest(self, counts: Sequence[int]) -> None:
        """Forgets the newest counts[b] tokens of row b, which came after its last round: rejected drafts.

        Raises:
            CacheError: a row does not hold as many.
        """
        if len(counts) != len(self.lengths) or not all(
            0 <= count <= length for count, length in zip(counts, self.lengths, strict=True)
        ):
            raise CacheError(f"counts is {list(counts)}, but the rows hold {self.lengths} entries.")
        self.lengths = [length - count for count, length in zip(counts, self.lengths, strict=True)]

    def positions_of(self, row: int) -> torch.Tensor:
        """[L, H_kv, length] int64, ascending: the logical positions that each head of a row holds."""
        first = row * self.capacity
        return torch.stack([layer[first : first + self.lengths[row]].T for layer in self.pools.positions])

    def report(self, row: int) -> Report:
        """The report that the server would give in `meta_info` once the request finished."""
        totals = self.totals[row]
        return Report(
            rounds=totals.rounds,
            evicted_tokens=totals.evicted_tokens,
            freed_slots=totals.freed_slots,
            frozen_length=min(self.frozen(row), self.lengths[row]),
            physical_length=self.lengths[row],
            logical_length=self.logical_length(row),
        )

    def branch(self, rows: Sequence[int], capacity: int) -> KVRows:
        """Copies of some rows, possibly several of one, that share nothing with these.

        Raises:
            CacheError: a row does not exist or exceeds the capacity.
        """
        if not rows or not all(0 <= row < len(self.lengths) for row in rows):
            raise CacheError(f"rows is {list(rows)}, but it must name some of the {len(self.lengths)} rows.")
        longest = max(self.lengths[row] for row in rows)
        if longest > capacity:
            raise CacheError(f"capacity is {capacity}, but a row to be copied holds {longest} KV entries.")
        copied = KVRows(
            [self.settings[row] for row in rows],
            self.pools.like(len(rows) * capacity),
            capacity,
            self._make_scorer,
            prompt_length=self.prompt_length,
            protected=self.protected,
            page_size=self.page_size,
        )
        for new, old in zip(copied.pools.all(), self.pools.all(), strict=True):
            target, source = new.unflatten(0, (len(rows), -1)), old.unflatten(0, (len(self.lengths), -1))
            for place, row in enumerate(rows):
                target[place, : self.lengths[row]] = source[row, : self.lengths[row]]
        copied.lengths = [self.lengths[row] for row in rows]
        copied.totals = [replace(self.totals[row]) for row in rows]
        return copied

    def _compact(self, row: int, plan: Plan) -> None:
        if self._mover is None:
            self._mover = Mover(self.pools.k_buffers, self.pools.v_buffers)
        device = self.pools.k_buffers[0].device
        first = row * self.capacity
        slots = torch.arange(first + plan.frozen, first + plan.old_length, device=device)[None]
        lengths, next_positions = (torch.tensor([n], device=device) for n in (plan.private_length, plan.next_position))
        recent = self.settings[row].rules.recent
        kept = self.policy_of(row).keep(slots, lengths, next_positions, plan.kept_private, recent)
        self._check_kept(row, kept, plan)
        self._mover.move(slots, kept, _STRATEGY)
        move_torch(self.pools.positions, *list_moves(slots, kept, _STRATEGY))
        self.totals[row].add(plan)
        self.lengths[row] = plan.new_length
        if self.after_round is not None:
            self.after_round(row, plan)

    def _check_kept(self, row: int, kept: torch.Tensor, plan: Plan) -> None:
        """Raises CacheError unless a policy returned sets as `Policy.keep` specifies."""
        layers, heads = len(self.pools.k_buffers), self.pools.k_buffers[0].shape[1]
        shapes = [(1, *sets, plan.kept_private) for sets in ((), (heads,), (layers, heads))]
        if kept.dtype != torch.int64 or tuple(kept.shape) not in shapes:
            raise CacheError(
                f"The policy of row {row} returned {kept.dtype} {list(kept.shape)}, but kept sets are int64 of one of "
                f"the shapes {[list(shape) for shape in shapes]}."
            )
        ascending = (kept[..., 1:] > kept[..., :-1]).all() & (kept >= 0).all() & (kept < plan.private_length).all()
        if not ascending:
            raise CacheError(
                f"The policy of row {row} returned indices that do not ascend within its {plan.private_length} "
                "private tokens."
            )
