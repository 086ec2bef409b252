"""Do answers about tools' results need what the agent itself wrote?

The agents of `benchmarks.serving.tool_loop`, without a server: one forward pass of transformers over an agent's whole
history, in which attention cannot see what the agent wrote in earlier turns, its thinking and its tool calls. What it
was given stays, like inputs of resumed turns. Then it is asked for the case numbers and the readings.

    all      everything sees everything, as when nothing is evicted
    asked    questions do not see what the agent wrote; the history was computed with it
    given    the history was computed without it; questions see it
    hidden   neither does: what a server with a vanishing budget leaves

An answer is right if each of its tokens is the likeliest after those before it. `logprob` is the log-probability of
whole answers. `low` and `high` bound the differences to `all` at 95 %, by a bootstrap over agents and their questions.

    python -m benchmarks.serving.tool_loop_reads --model FOLDER --json tool-loop-reads.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import print_table, write
from benchmarks.quality.cells import Unit
from benchmarks.quality.model import load_tokenizer
from benchmarks.quality.table import difference
from benchmarks.serving.servers import demonstration_model, sizes_asked
from benchmarks.serving.tool_loop import bounds
from benchmarks.serving.tool_loop_tasks import INPUTS, Ask, Work, made

VIEWS = {"all": (False, False), "asked": (False, True), "given": (True, False), "hidden": (True, True)}
"""Whether the history, and whether questions do not see what the agent wrote before."""


@dataclass(frozen=True)
class Sizes:
    """Tokens, but for agents and turns."""

    agents: int = 6
    first: int = 0
    turns: int = 12
    results: tuple[int, int] = (40, 100)
    thoughts: tuple[int, int] = (36, 80)


QUICK = Sizes(agents=1, turns=3)


@dataclass(frozen=True)
class Reader:
    """A model of transformers that reads histories. Attention sees what `hidden` does not hide."""

    tokenizer: Any
    model: Any

    def ids_of(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    def _read(self, ids: list[int], cache: Any, hidden: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, vocabulary] log-probabilities after the last tokens.

        Args:
            ids: what follows after the cache, which it extends.
            hidden: [n] bool, which of the cache's first n tokens are not seen.
        """
        start = cache.get_seq_length()
        key = torch.arange(start + len(ids))
        seen = key <= torch.arange(start, start + len(ids))[:, None]
        seen[:, : len(hidden)] &= ~hidden
        mask = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
        output = self.model(
            input_ids=torch.tensor([ids]),
            attention_mask=mask[None, None],
            position_ids=key[None, start:],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=rows,
        )
        return output.logits[0].float().log_softmax(-1)

    @torch.inference_mode()
    def history(self, work: Work, hides: bool) -> tuple[Any, torch.Tensor]:
        """The cache after an agent's turns, and which of its tokens the agent wrote, [n] bool.

        The last token of each of its messages does not count: a server computes it with the next input.

        Args:
            hides: whether what the agent wrote is hidden from later turns.
        """
        from transformers import DynamicCache

        cache, own, last = DynamicCache(), torch.zeros(0, dtype=torch.bool), []
        for turn in work.turns:
            given, written = last + self.ids_of(turn.input), self.ids_of(turn.thinking) + self.ids_of(turn.reply)
            ids, last = given + written[:-1], written[-1:]
            self._read(ids, cache, own if hides else own[:0], 1)
            own = torch.cat([own, torch.arange(len(ids)) >= len(given)])
        self._read(last, cache, own if hides else own[:0], 1)
        own = torch.cat([own, torch.zeros(1, dtype=torch.bool)])
        return cache, own

    @torch.inference_mode()
    def answer(self, ask: Ask, cache: Any, hidden: torch.Tensor) -> dict:
        """Whether the model gives the answer, and its log-probability; the cache stays as it is."""
        length, wanted = cache.get_seq_length(), self.ids_of(ask.answer)
        found = self._read(self.ids_of(ask.text) + wanted, cache, hidden, len(wanted) + 1)[:-1]
        cache.crop(length - cache.get_seq_length())
        logprob = found.gather(1, torch.tensor(wanted)[:, None]).sum().item()
        return {"kind": ask.kind, "right": found.argmax(-1).tolist() == wanted, "logprob": logprob}


_reader: Reader | None = None
"""This process's."""


def _load(path: str) -> None:
    """Loads the model in one of the processes, which have a core each."""
    global _reader
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    _reader = Reader(load_tokenizer(path), AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval())


def _read(number: int, sizes: Sizes) -> dict[str, list[dict]]:
    """The answers of one agent."""
    assert _reader is not None
    reader = _reader
    work = made(number, sizes.turns, sizes.results, sizes.thoughts, lambda text: len(reader.ids_of(text)))
    return read(reader, work)


def read(reader: Reader, work: Work) -> dict[str, list[dict]]:
    """The answers under each view, those about what the agent was given."""
    asks = [ask for ask in work.asks if ask.kind in INPUTS and ask.kind != "instruction"]
    answers = {}
    for hides in (False, True):
        cache, own = reader.history(work, hides)
        for view, (from_history, from_questions) in VIEWS.items():
            if from_history is hides:
                answers[view] = [reader.answer(ask, cache, own if from_questions else own[:0]) for ask in asks]
    return answers


def rows_of(agents: Sequence[dict[str, list[dict]]]) -> list[dict]:
    """One row a view."""
    rows = []
    for view in VIEWS:
        pairs = [(own, base) for agent in agents for own, base in zip(agent[view], agent["all"], strict=True)]
        row = {
            "view": view,
            "questions": len(pairs),
            "right": sum(own["right"] for own, _ in pairs),
            "lost": sum(own["right"] < base["right"] for own, base in pairs),
            "won": sum(own["right"] > base["right"] for own, base in pairs),
            "logprob": sum(own["logprob"] for own, _ in pairs) / len(pairs),
        }
        for key, names in (("right", ("low", "high")), ("logprob", ("logprob_low", "logprob_high"))):
            own, base = (
                [[Unit(float(one[key]), 0.0) for one in agent[name]] for agent in agents] for name in (view, "all")
            )
            row |= dict(zip(names, difference(own, base, key), strict=True))
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="one agent, three turns")
    parser.add_argument("--model", help="one that knows ChatML; by default SmolLM2-135M, as `make model` prepares it")
    parser.add_argument("--agents", type=int)
    parser.add_argument("--first", type=int, help="number of the first agent")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--results", type=bounds, metavar="LOW-HIGH", help="tokens of a tool's result")
    parser.add_argument("--thoughts", type=bounds, metavar="LOW-HIGH", help="tokens of what is thought in a turn")
    options = parser.parse_args()
    sizes = sizes_asked(QUICK if options.quick else Sizes(), options)
    model = options.model or demonstration_model()[0]
    numbers, agents, started = range(sizes.first, sizes.first + sizes.agents), [], time.monotonic()
    processes = ProcessPoolExecutor(len(os.sched_getaffinity(0)), get_context("spawn"), _load, (model,))
    with processes as pool:
        for answers in pool.map(_read, numbers, itertools.repeat(sizes)):
            agents.append(answers)
            report(agents, time.monotonic() - started, model, sizes, options)


def report(agents: Sequence[dict], seconds: float, model: str, sizes: Sizes, options: argparse.Namespace) -> None:
    """Prints and writes the figures of the agents so far, so that a run that is ended leaves some."""
    rows = rows_of(agents)
    print(f"{seconds:.0f} s, {len(agents)} agents", flush=True)
    print_table(list(rows[0]), [list(row.values()) for row in rows])
    setting = {"model": Path(model).name, "dtype": "float32", **asdict(sizes), "agents": len(agents)}
    write({"setting": setting, "views": rows, "asked": agents}, options.json, options.quick)


if __name__ == "__main__":
    main()
