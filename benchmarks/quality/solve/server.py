"""Problems solved by a live server: dense, as it was started, or by settings that a request may choose.

Each problem's chat is sent as token ids, greedily, one request at a time, with its budget under
`custom_params.triattention`. The prompt stays frozen. Rounds of requests that run alone come at the same tokens as in
the cache for transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import requests

from benchmarks.quality.choices import DENSE
from benchmarks.quality.server import AskError, askable_fields
from benchmarks.quality.solve.cells import Cell
from benchmarks.quality.solve.chat import Chat
from benchmarks.quality.solve.format import Problem
from benchmarks.quality.solve.here import Answer
from sglang_triattn.config import Config

_PATIENCE_S = 3600


@dataclass
class ServerSolver:
    """Sends problems to a server.

    Attributes:
        url: the server's.
        chat: the tokenizer of its model.
        interval: of rounds, in tokens; None means the server's.
        limit: most tokens of a text.
        settings: the server's own.

    Raises:
        AskError: the server does not compress.
        requests.RequestException: the server does not answer.
    """

    url: str
    chat: Chat
    interval: int | None = None
    limit: int = 4096
    progress: Callable[[str], None] = field(default=print)
    settings: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        info = requests.get(f"{self.url}/server_info", timeout=60).json()
        found = info["internal_states"][0].get("triattention")
        if found is None:
            raise AskError(f"The server at {self.url} does not compress: start it with --enable-triattention.")
        self.settings = {entry.name: found[entry.name] for entry in dataclasses.fields(Config)}

    def solve(self, problem: Problem, cells: Sequence[Cell]) -> dict[Cell, Answer]:
        """The answer of every cell; equal requests are sent once.

        Raises:
            AskError: the server cannot do what a cell asks for.
        """
        prompt = self.chat.prompt(problem)
        draft = len(self.chat.ids(problem.trace)) if problem.trace else 0
        limit = min(self.limit, draft * 5 // 4 + 64) if draft else self.limit
        dense = self._generate(prompt, {"enabled": False}, limit)
        limit = min(limit, dense.tokens * 5 // 4 + 32)
        answers: dict[tuple, Answer] = {}
        found: dict[Cell, Answer] = {}
        for cell in cells:
            if cell.choice.name == DENSE:
                found[cell] = dense
                continue
            fields = self.fields_of(cell, dense.tokens)
            key = tuple(fields.items())
            if key not in answers:
                self.progress(f"{problem.id}: {fields}")
                answers[key] = self._generate(prompt, fields, limit)
            found[cell] = answers[key]
        return found

    def fields_of(self, cell: Cell, dense_tokens: int) -> dict[str, Any]:
        """What a request for a cell says under `custom_params.triattention`.

        Raises:
            AskError: a request cannot ask for it.
        """
        given = askable_fields(cell.choice)
        config = cell.config(dense_tokens, self.interval)
        if config.budget > self.settings["budget"]:
            raise AskError(
                f"A budget of {config.budget} tokens is above the server's: start it with --triattention-budget "
                f"{config.budget}, or leave the size out."
            )
        interval = config.interval if self.interval or "interval" in given else self.settings["interval"]
        fields = {"budget": config.budget, "interval": interval}
        return fields | ({"recent": config.recent} if "recent" in given else {})

    def _generate(self, prompt: list[int], fields: dict[str, Any], limit: int) -> Answer:
        sampling = {
            "max_new_tokens": limit,
            "temperature": 0,
            "stop_token_ids": sorted(self.chat.ends),
            "custom_params": {"triattention": fields},
        }
        body = {"input_ids": prompt, "sampling_params": sampling}
        response = requests.post(f"{self.url}/generate", json=body, timeout=_PATIENCE_S)
        if response.status_code != 200:
            raise AskError(f"The server refuses a request: {response.text.strip()}")
        answer = response.json()
        meta = answer["meta_info"]
        evicted = (meta.get("triattention") or {}).get("evicted_tokens", 0)
        return Answer(answer["text"], meta["completion_tokens"], evicted)
