"""Problems solved in the cache for transformers, every policy a row of its own.

The dense text comes first. It is the draft of all other rows, and its length makes shares into budgets. Every row
computes K/V from what is left, as on a server, with its rounds at the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.quality.choices import DENSE, frozen_of, read_choice
from benchmarks.quality.foresight import LookedUp, by_text
from benchmarks.quality.policies import RowFacts
from benchmarks.quality.queries import QueryLog, recording
from benchmarks.quality.solve.cells import Cell
from benchmarks.quality.solve.chat import Chat
from benchmarks.quality.solve.format import Problem
from sglang_triattn.rounds.plan import max_kv_tokens
from sglang_triattn.stats.file import QueryStats
from sglang_triattn.transformers_cache.cache import CompactedCache, shape_of
from sglang_triattn.transformers_cache.feed import compute_dense, feed, replay
from sglang_triattn.transformers_cache.greedy import BLOCK, generate
from sglang_triattn.transformers_cache.policy import Setting

_DENSE = Cell(read_choice(DENSE), share=1.0)


@dataclass(frozen=True)
class Answer:
    """What a row wrote.

    Attributes:
        text: without what ends it.
        tokens: its length, the end included.
        evicted: tokens that its rounds evicted.
    """

    text: str
    tokens: int
    evicted: int


@dataclass
class Solver:
    """Solves problems with a model.

    Attributes:
        model: a transformers model, loaded with attention by `transformers_cache.queries.ATTENTION`.
        chat: its tokenizer.
        stats: its statistics; needed by choices that `scores`.
        interval: of rounds, in tokens; None means the server's.
        limit: most tokens of a text.
        rows: policies side by side.
        seed: for random choices.
    """

    model: Any
    chat: Chat
    stats: QueryStats | None
    interval: int | None
    limit: int = 4096
    rows: int = 8
    seed: int = 1
    progress: Callable[[str], None] = field(default=print)

    def solve(self, problem: Problem, cells: Sequence[Cell]) -> dict[Cell, Answer]:
        """The answer of every cell; equal settings are computed once.

        Raises:
            TriAttentionError, ChoiceError: a setting cannot work.
        """
        prompt = self.chat.prompt(problem)
        log = QueryLog(shape_of(self.model).num_layers, shape_of(self.model).rope)
        queries = any(cell.choice.control is not None and cell.choice.control.needs_queries for cell in cells)
        with recording({0: log} if queries else {}):
            prefix = compute_dense(self.model, prompt[:-1])
        draft = self.chat.ids(problem.trace) if problem.trace else []
        # A right text is about as long as its trace; without one, the limit decides.
        limit = min(self.limit, len(draft) * 5 // 4 + 64) if draft else self.limit
        (dense,), _ = self._write(problem, [_DENSE], prompt, prefix, log, draft, limit, limit)
        limit = min(limit, len(dense) * 5 // 4 + 32)
        future = None
        if any(cell.choice.foresees for cell in cells):
            future = by_text(self.model, [*prompt, *dense], len(prompt) + limit)
        found: dict[Cell, Answer] = {}
        groups: dict[Setting, list[Cell]] = {}
        for cell in cells:
            if cell.choice.name == DENSE:
                found[cell] = self._answer(dense, 0)
            else:
                setting = self._setting(problem, cell, prompt, len(dense), limit, None, None)
                groups.setdefault(setting, []).append(cell)
        owners = list(groups.values())
        for start in range(0, len(owners), self.rows):
            some = owners[start : start + self.rows]
            self.progress(f"{problem.id}: settings {start + 1} to {start + len(some)} of {len(owners)}")
            firsts = [own[0] for own in some]
            texts, evicted = self._write(problem, firsts, prompt, prefix, log, dense, len(dense), limit, future)
            for own, text, count in zip(some, texts, evicted, strict=True):
                found |= dict.fromkeys(own, self._answer(text, count))
        return found

    def _write(
        self,
        problem: Problem,
        cells: Sequence[Cell],
        prompt: Sequence[int],
        prefix: Any,
        log: QueryLog,
        draft: Sequence[int],
        dense_tokens: int,
        limit: int,
        future: LookedUp | None = None,
    ) -> tuple[list[list[int]], list[int]]:
        """Every cell's text in tokens, and how many of them were evicted."""
        logs = {
            row: log.copy()
            for row, cell in enumerate(cells)
            if cell.choice.control is not None and cell.choice.control.needs_queries
        }
        settings = [
            self._setting(problem, cell, prompt, dense_tokens, limit, logs.get(row), future)
            for row, cell in enumerate(cells)
        ]
        # The cost of few tokens is that of reading the weights.
        block = BLOCK if len(cells) > 1 else 2 * BLOCK
        end = len(prompt) + limit
        bounds = [
            max_kv_tokens(one.rules, frozen=frozen_of(one.config, len(prompt)), logical_end=end) for one in settings
        ]
        cache = CompactedCache.for_model(
            self.model, settings, self.stats, capacity=min(max(bounds), end) + block, prompt_length=len(prompt)
        )
        # The logs by the row of the cache in use; recording looks them up at every call of the model.
        live, evicted = dict(logs), [0] * len(cells)

        def settled(used: CompactedCache, numbers: Sequence[int]) -> None:
            live.clear()
            for row, number in enumerate(numbers):
                evicted[number] = used.rows.totals[row].evicted_tokens
                if number in logs:
                    live[row] = logs[number]
                    live[row].keep_first(used.rows.logical_length(row))

        with recording(live):
            replay(cache, prefix)
            first = feed(self.model, cache, prompt[-1:]).argmax(-1)[:, 0].tolist()
            texts = generate(
                self.model,
                cache,
                first,
                limit=limit,
                stop=self.chat.ends,
                drafts=[draft] * len(cells),
                block=block,
                settled=settled,
            )
        return texts, evicted

    def _setting(
        self,
        problem: Problem,
        cell: Cell,
        prompt: Sequence[int],
        dense_tokens: int,
        limit: int,
        log: QueryLog | None,
        future: LookedUp | None,
    ) -> Setting:
        config, seed = cell.config(dense_tokens, self.interval), f"{self.seed} {problem.id}"
        tokens, rope = len(prompt) + limit, shape_of(self.model).rope
        facts = RowFacts(seed, tokens, frozen_of(config, len(prompt)), rope, log, self.stats, future)
        return cell.choice.setting(config, facts)

    def _answer(self, text: list[int], evicted: int) -> Answer:
        own = text[:-1] if text[-1] in self.chat.ends else text
        return Answer(self.chat.text(own), len(text), evicted)
