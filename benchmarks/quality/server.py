"""The quality benchmark on a live server: its model, its settings, its scheduler.

For each answer the prompt is put into the radix tree first; then prompt, private text and question are sent as one
request with `"prompt": "compact"`: the server freezes what the tree holds and compacts the rest between the chunks of
its prefill. The answer is teacher-forced with one request per token, which asks for the next token and for the
log-probability of the right one; log-probabilities of the prompt would keep a server from compacting it. Each request
has its own part of the tree (`extra_key`), so that none finds, frozen, what another left there. Of scored text every
64th token is asked for.

Rounds run between chunks, so chunks should be no longer than the interval: `--chunked-prefill-size 128`. Requests
that are prefilled at the same time share a chunk, which moves their rounds; one at a time, rounds are always the same.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import requests

from benchmarks.quality.cells import Cell, Found, Unit
from benchmarks.quality.choices import DENSE, Choice
from benchmarks.quality.tokens import TEXT, Tokens
from sglang_triattn.config import Config

STEP = 64
"""One in this many scored tokens is asked for."""
ASKABLE = ("interval", "recent")
"""Settings that a request may choose."""
_PATIENCE_S = 3600


class AskError(ValueError):
    """A server cannot be measured; the message is one sentence for the user."""


def askable_fields(choice: Choice) -> dict[str, str]:
    """The fields of a choice other than dense, if requests can ask a server for it.

    Raises:
        AskError: they cannot.
    """
    given = dict(choice.fields)
    if choice.control is not None or choice.early or not choice.weighed or not set(given) <= set(ASKABLE):
        raise AskError(
            f"A server cannot be asked for {choice.name}, because it compacts as it was started: choose among "
            f"dense, default, and settings: with {' and '.join(ASKABLE)}."
        )
    return given


@dataclass
class ServerRunner:
    """Runs streams through a server.

    Attributes:
        url: the server's.
        interval: of rounds, in tokens; None means the server's.
        parallel: requests at once; above one, rounds depend on which of them share a chunk.
        progress: called with a line of text.
        settings: the server's own.
        chunk: tokens per chunk of the server's prefill.

    Raises:
        AskError: the server does not compress, or prefills prompts as a whole.
        requests.RequestException: the server does not answer.
    """

    url: str
    interval: int | None = None
    parallel: int = 1
    progress: Callable[[str], None] = field(default=print)
    settings: dict[str, Any] = field(init=False)
    chunk: int = field(init=False)
    page_size: int = field(init=False)

    def __post_init__(self) -> None:
        info = requests.get(f"{self.url}/server_info", timeout=60).json()
        found = info["internal_states"][0].get("triattention")
        if found is None:
            raise AskError(f"The server at {self.url} does not compress: start it with --enable-triattention.")
        self.settings = {entry.name: found[entry.name] for entry in dataclasses.fields(Config)}
        self.chunk = info.get("chunked_prefill_size") or -1
        self.page_size = info["page_size"]
        if self.chunk < 1:
            raise AskError(
                f"The server at {self.url} prefills prompts as a whole, so that no round runs: start it with "
                f"--chunked-prefill-size {found['interval']}."
            )
        if self.chunk > found["interval"]:
            self.progress(
                f"the server prefills {self.chunk} tokens at once and looks for rounds in between: with "
                f"--chunked-prefill-size {found['interval']} it would hold no more than a decoding request does"
            )

    def run(self, stream: Tokens, cells: Sequence[Cell]) -> Found:
        """Units of every cell; equal requests are sent once. `dense` must be among the cells.

        Raises:
            AskError: the server cannot do what a cell asks for, or compacts nothing.
        """
        # Request fields -> the cells that share them, dense first: agreement is measured against it.
        groups: dict[tuple, list[Cell]] = {}
        for cell in sorted(cells, key=lambda cell: cell.choice.name != DENSE):
            fields = self.fields_of(cell, len(stream.private))
            groups.setdefault(tuple(fields.items()), []).append(cell)
        found: Found = {}
        likely: list[int] = []
        for number, (fields, own) in enumerate(groups.items(), 1):
            self.progress(f"{stream.id}: settings {number} of {len(groups)}")
            if stream.score_last:
                tasks = self._scored(stream, dict(fields), likely)
            else:
                tasks = self._answered(stream, dict(fields))
            found |= dict.fromkeys(own, tasks)
        return found

    def fields_of(self, cell: Cell, private: int) -> dict[str, Any]:
        """What a request for a cell says under `custom_params.triattention`.

        The server's own settings apply except for the budget and what it derives from that.

        Raises:
            AskError: a request cannot ask for it.
        """
        choice, served = cell.choice, self.settings
        if choice.name == DENSE:
            return {"enabled": False}
        given = askable_fields(choice)
        config = cell.config(private, self.interval)
        if config.budget > served["budget"]:
            raise AskError(
                f"A share of {cell.share} of {private} tokens is a budget of {config.budget}, above the server's: "
                f"start it with --triattention-budget {config.budget}, or leave the share out."
            )
        interval = config.interval if self.interval or "interval" in given else served["interval"]
        fields = {"prompt": "compact", "budget": config.budget, "interval": interval}
        return fields | ({"recent": config.recent} if "recent" in given else {})

    def _answered(self, stream: Tokens, fields: dict[str, Any]) -> dict[str, list[Unit]]:
        """Task -> units, in the order of the questions."""
        whole = stream.prompt + stream.private
        jobs = [
            (whole + one.text + one.answer[:place], token)
            for one in stream.questions
            for place, token in enumerate(one.answer)
        ]
        answers = iter(self._predict_all(stream, fields, jobs))
        tasks: dict[str, list[Unit]] = {}
        for one in stream.questions:
            tokens, logprobs = zip(*(next(answers) for _ in one.answer), strict=True)
            unit = Unit(float(list(tokens) == one.answer), sum(logprobs) / len(logprobs))
            tasks.setdefault(one.task, []).append(unit)
        return tasks

    def _scored(self, stream: Tokens, fields: dict[str, Any], likely: list[int]) -> dict[str, list[Unit]]:
        """Asks for every STEP-th token at the end; the first caller's answers fill `likely`."""
        ids = stream.prompt + stream.private
        jobs = [(ids[:place], ids[place]) for place in range(len(ids) - stream.score_last, len(ids), STEP)]
        predictions = self._predict_all(stream, fields, jobs)
        if not likely:
            likely.extend(token for token, _ in predictions)
        pairs = zip(predictions, likely, strict=True)
        return {TEXT: [Unit(float(own == dense), logprob) for (own, logprob), dense in pairs]}

    def _predict_all(
        self, stream: Tokens, fields: dict[str, Any], jobs: Sequence[tuple[list[int], int]]
    ) -> list[tuple[int, float]]:
        with ThreadPoolExecutor(self.parallel) as pool:
            return list(pool.map(lambda job: self._predict(stream, fields, *job), jobs))

    def _predict(self, stream: Tokens, fields: dict[str, Any], ids: list[int], target: int) -> tuple[int, float]:
        """The most likely token after `ids`, and the log-probability of `target`."""
        key = f"quality {uuid.uuid4()}"
        self._generate(stream.prompt, {"prompt": "frozen"}, key)
        facts = self._generate(ids, fields, key, return_logprob=True, token_ids_logprob=[target])["meta_info"]
        if fields.get("enabled", True):
            self._check_compacted(stream, fields, len(ids), facts)
        (logprob, *_), *_ = facts["output_token_ids_logprobs"][0]
        return facts["output_token_logprobs"][0][1], logprob

    def _check_compacted(self, stream: Tokens, fields: dict[str, Any], length: int, facts: dict[str, Any]) -> None:
        """Raises AskError if the prompt was not shared, or a round that the lengths call for is missing."""
        frozen = facts["triattention"]["frozen_length"]
        shared = len(stream.prompt) - len(stream.prompt) % self.page_size
        if not shared <= frozen <= max(shared, self.settings["sinks"]):
            raise AskError(
                f"The server froze {frozen} tokens, but the prompt of {stream.id} has {len(stream.prompt)}: leave its "
                "radix cache on, and send it no other requests meanwhile."
            )
        if not facts["triattention"]["rounds"] and length - frozen >= fields["budget"] + 2 * fields["interval"]:
            raise AskError(
                f"The server ran no round on {length - frozen} tokens: start it with --chunked-prefill-size "
                f"{fields['interval']}."
            )

    def _generate(self, ids: list[int], fields: dict[str, Any], key: str, **more: Any) -> dict[str, Any]:
        sampling = {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}
        sampling["custom_params"] = {"triattention": fields}
        body = {"input_ids": ids, "sampling_params": sampling, "extra_key": key, **more}
        response = requests.post(f"{self.url}/generate", json=body, timeout=_PATIENCE_S)
        if response.status_code != 200:
            raise AskError(f"The server refuses a request: {response.text.strip()}")
        return response.json()
