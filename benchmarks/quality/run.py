"""The quality benchmark on transformers: streams into compacted rows, then questions and scored text.

Several choices lie side by side as rows of one `CompactedCache`. For questions, rounds run on K/V that was computed
once, with everything in sight (`replay`); with `fed` every row computes its own, as a server does. Scored text is
always fed. All questions of a stream are asked in one forward pass: a question sees what is left and itself, but no
other question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.quality.ask import ask, logprobs_of, packs
from benchmarks.quality.cells import Cell, Found, Unit
from benchmarks.quality.choices import DENSE, frozen_of
from benchmarks.quality.foresight import LookedUp, by_questions, by_text
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.queries import QueryLog, recording
from benchmarks.quality.tokens import TEXT, Asked, Tokens
from sglang_triattn.rounds.plan import max_kv_tokens
from sglang_triattn.stats.file import QueryStats
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import CHUNK, compute_dense, feed, replay
from sglang_triattn.transformers_cache.policy import Setting

BLOCK = 64
"""Adjacent tokens of scored text that count as one unit."""
# Scored tokens per row whose logits are held at once.
_PIECE = 64


@dataclass(frozen=True)
class _Plan:
    """The rows that a stream needs.

    Attributes:
        groups: setting -> the cells that share it.
        logs: queries to record, by the setting whose row they are of; None stands for the dense pass, for all.
    """

    groups: dict[Setting, list[Cell]]
    logs: dict[Setting | None, QueryLog]


@dataclass
class Runner:
    """Runs streams through a model.

    Attributes:
        model: a transformers model, loaded with attention by `transformers_cache.queries.ATTENTION`.
        stats: its statistics; needed by choices that `scores`.
        interval: of rounds, in tokens; None means the server's.
        rows: number of choices side by side.
        fed: whether questions, too, are asked of rows that computed their own K/V.
        seed: for random choices.
        progress: called with a line of text.
        second_reading: token ids of a text -> what `read-again` decides by, see `RowFacts.looked_up`; called
            only if a choice `reads_again`.
    """

    model: Any
    stats: QueryStats | None
    interval: int | None = None
    rows: int = 8
    fed: bool = False
    seed: int = 1
    progress: Callable[[str], None] = field(default=print)
    second_reading: Callable[[list[int]], LookedUp] | None = None

    def run(self, stream: Tokens, cells: Sequence[Cell]) -> Found:
        """Units of every cell; equal settings are computed once. `dense` must be among the cells.

        Raises:
            TriAttentionError, ChoiceError: a setting cannot work.
        """
        ids = torch.tensor(stream.prompt + stream.private)
        replayed = not self.fed and not stream.score_last
        plan = self._plan(stream, cells, replayed)
        if replayed:
            with recording({0: plan.logs[None]} if None in plan.logs else {}):
                dense = compute_dense(self.model, ids)
        settings, found = list(plan.groups), {}
        most_likely: list[torch.Tensor] = []
        for start in range(0, len(settings), self.rows):
            some = settings[start : start + self.rows]
            self.progress(f"{stream.id}: settings {start + 1} to {start + len(some)} of {len(settings)}")
            cache = self._cache(some, stream)
            with recording({row: plan.logs[setting] for row, setting in enumerate(some) if setting in plan.logs}):
                if stream.score_last:
                    tasks = self._scored(cache, ids, stream.score_last, most_likely)
                elif replayed:
                    replay(cache, dense)
                else:
                    feed(self.model, cache, ids, logits=0)
            if not stream.score_last:
                tasks = self._answered(cache, stream.questions)
            for setting, units in zip(some, tasks, strict=True):
                found |= dict.fromkeys(plan.groups[setting], units)
                if setting in plan.logs:
                    plan.logs[setting].forget()
        return found

    def _plan(self, stream: Tokens, cells: Sequence[Cell], replayed: bool) -> _Plan:
        shape, plan = shape_of(self.model), _Plan({}, {})
        length = len(stream.prompt) + len(stream.private)
        again = future = None
        if self.second_reading is not None and any(cell.choice.reads_again for cell in cells):
            again = self.second_reading(stream.prompt + stream.private)
        if any(cell.choice.foresees for cell in cells):
            future = self._foresight(stream, length)
        # Dense first: agreement is measured against it.
        for cell in sorted(cells, key=lambda cell: cell.choice.name != DENSE):
            config = cell.config(len(stream.private), self.interval)
            control, log = cell.choice.control, None
            if control is not None and control.needs_queries:
                log = plan.logs.get(None) or QueryLog(shape.num_layers, shape.rope)
            frozen = frozen_of(config, len(stream.prompt))
            looked_up = future if cell.choice.foresees else again
            facts = RowFacts(f"{self.seed} {stream.id}", length, frozen, shape.rope, log, self.stats, looked_up)
            setting = cell.choice.setting(config, facts)
            plan.groups.setdefault(setting, []).append(cell)
            if log is not None:
                plan.logs[None if replayed else setting] = log
        return plan

    def _foresight(self, stream: Tokens, length: int) -> LookedUp:
        ids = stream.prompt + stream.private
        if stream.score_last:
            return by_text(self.model, ids, length)
        return by_questions(self.model, compute_dense(self.model, ids), stream.questions)

    def _cache(self, settings: Sequence[Setting], stream: Tokens) -> CompactedCache:
        end, prompt = len(stream.prompt) + len(stream.private), len(stream.prompt)
        bounds = [
            max_kv_tokens(setting.rules, frozen=frozen_of(setting.config, prompt), logical_end=end)
            for setting in settings
        ]
        # One chunk more, which a prompt that is compacted may hold.
        capacity = min(max(bounds) + CHUNK, end)
        return CompactedCache.for_model(self.model, settings, self.stats, capacity=capacity, prompt_length=prompt)

    def _answered(self, cache: CompactedCache, questions: Sequence[Asked]) -> list[dict[str, list[Unit]]]:
        """[row]: task -> units, in the order of the questions."""
        tasks: list[dict[str, list[Unit]]] = [{} for _ in cache.rows.lengths]
        for pack in packs(questions):
            size = sum(len(one.text) + len(one.answer) - 1 for one in pack)
            right, logprobs = ask(self.model, cache.branch(room=size), pack)
            for row, units in enumerate(tasks):
                for number, one in enumerate(pack):
                    unit = Unit(float(right[row, number]), float(logprobs[row, number]))
                    units.setdefault(one.task, []).append(unit)
        return tasks

    def _scored(
        self, cache: CompactedCache, ids: torch.Tensor, count: int, most_likely: list[torch.Tensor]
    ) -> list[dict[str, list[Unit]]]:
        """[row]: blocks of the last `count` tokens. The first row ever scored fills `most_likely`."""
        start = len(ids) - count
        if start > 1:
            feed(self.model, cache, ids[: start - 1], logits=0)
        tokens, logprobs = [], []
        for place in range(start - 1, len(ids) - 1, _PIECE):
            piece = ids[place : min(place + _PIECE, len(ids) - 1)]
            logits = feed(self.model, cache, piece, logits=len(piece))
            tokens.append(logits.argmax(-1))
            targets = ids[place + 1 : place + 1 + len(piece)].to(logits.device)
            logprobs.append(torch.stack([logprobs_of(row, targets) for row in logits]))
        likely, logprob = torch.cat(tokens, dim=1), torch.cat(logprobs, dim=1)
        if not most_likely:
            most_likely.append(likely[0])
        agrees = (likely == most_likely[0]).double()
        return _blocks(agrees, logprob)


def _blocks(agrees: torch.Tensor, logprobs: torch.Tensor) -> list[dict[str, list[Unit]]]:
    """[row]: the units of [B, count] answers."""
    return [
        {TEXT: [Unit(float(r.sum()), float(p.sum()), len(r)) for r, p in zip(*parts, strict=True)]}
        for parts in (
            (right.split(BLOCK), logprob.split(BLOCK)) for right, logprob in zip(agrees, logprobs, strict=True)
        )
    ]
