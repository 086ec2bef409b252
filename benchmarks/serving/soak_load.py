"""What the clients of the soak ask for: one method of `Visitor` is one thing that a client does.

Each checks the answer. A request that fails, ends early, or is served though it is wrong raises `Fault`.
"""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from dataclasses import dataclass, field

import requests

from benchmarks.serving.streamed import events

BUDGET, INTERVAL, RECENT = 64, 32, 16
STEMS, STEM = 6, 96
"""So many different beginnings of prompts, of so many tokens, are shared by all clients."""
PATIENCE_S = 300
LIVES_S = 15
"""Time to live of a conversation: short, so that abandoned ones expire while the soak runs."""
BAD = (
    {"budget": 0},
    {"budget": BUDGET + 1},
    {"interval": "often"},
    {"budgets": 32},
    {"conversation": ""},
    {"prompt": "shared"},
    {"release": True},
)


class Fault(Exception):
    """A request was not answered as it should have been."""


@dataclass
class Diary:
    """What all clients did.

    Attributes:
        done: how often each thing was done.
        tokens: generated.
        starts: how conversations' turns started.
        latencies: of streams, [seconds since the start, time to first token, times between tokens], in seconds.
        faults: sentences.
    """

    begun: float = field(default_factory=time.monotonic)
    done: Counter = field(default_factory=Counter)
    tokens: int = 0
    starts: Counter = field(default_factory=Counter)
    latencies: list[tuple[float, float, list[float]]] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)


class Visitor:
    """One client: does one thing after the other, drawn from its seed."""

    def __init__(self, url: str, vocabulary: int, diary: Diary, seed: int) -> None:
        self._url, self._vocabulary, self._diary, self._seed = url, vocabulary, diary, seed
        self._draw = random.Random(seed)
        self._session = requests.Session()
        self._talks = 0
        # Weights: bulk of the time goes to streams and conversations.
        self._things = {
            self.stream: 6, self.batch: 3, self.fork: 2, self.leave: 3, self.abort: 2, self.talk: 4, self.read: 2,
            self.choose: 3, self.err: 2, self.flush: 1,
        }  # fmt: skip

    def act(self) -> None:
        """Does something, and notes it."""
        (thing,) = self._draw.choices(list(self._things), list(self._things.values()))
        try:
            thing()
        except (Fault, requests.RequestException) as fault:
            self._diary.faults.append(f"{thing.__name__}: {fault}")
        self._diary.done[thing.__name__] += 1

    def stream(self) -> None:
        """A streamed answer, timed."""
        tokens, start, last, times = self._length(), time.monotonic(), {}, []
        with self._post(self._ids(), self._sampling(tokens), stream=True) as response:
            for event in events(response):
                times.append(time.monotonic())
                last = event
        self._check(last, tokens)
        gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
        self._diary.latencies.append((start - self._diary.begun, times[0] - start, gaps))

    def batch(self) -> None:
        """Several prompts in one request."""
        tokens = self._length()
        for answer in self._answers([self._ids() for _ in range(3)], self._sampling(tokens)):
            self._check(answer, tokens)

    def fork(self) -> None:
        """Several answers to one prompt."""
        tokens = self._length()
        answers = self._answers(self._ids(), self._sampling(tokens, n=3, temperature=1.0))
        if len(answers) != 3:
            raise Fault(f"{len(answers)} answers instead of 3")
        for answer in answers:
            self._check(answer, tokens)

    def leave(self) -> None:
        """A client that hangs up in the middle of an answer."""
        with self._post(self._ids(), self._sampling(400), stream=True) as response:
            answer = events(response)
            for _ in range(self._draw.randrange(1, 150)):
                next(answer)
        # The connection is not used again, so it closes.
        self._session.close()
        self._session = requests.Session()

    def abort(self) -> None:
        """An answer that is aborted by name, and is nevertheless an answer."""
        name, last = f"soak-{self._seed}-{self._draw.getrandbits(48)}", {}
        until = self._draw.randrange(1, 150)
        with self._post(self._ids(), self._sampling(400), stream=True, rid=name) as response:
            for seen, event in enumerate(events(response), 1):
                last = event
                if seen == until:
                    self._expect(requests.post(f"{self._url}/abort_request", json={"rid": name}, timeout=60), 200)
        kind = last["meta_info"]["finish_reason"]["type"]
        if kind not in ("abort", "length"):
            raise Fault(f"an aborted request ended by {kind}")

    def talk(self) -> None:
        """A conversation of some turns, which is released, or abandoned; sometimes with a changed past."""
        self._talks += 1
        name, ids, turns = f"talk {self._seed} {self._talks}", self._ids(), self._draw.randrange(1, 5)
        for turn in range(turns):
            released = turn == turns - 1 and self._draw.random() < 0.5
            fields = {"conversation": name, **({"release": True} if released else {})}
            tokens = self._length()
            (answer,) = self._answers([ids], self._sampling(tokens, fields))
            report = self._check(answer, tokens)
            start = report["conversation"]
            # A later turn counts as new, too, if no turn before it has had a round.
            if turn == 0 and start != "new":
                raise Fault(f"the first turn of a conversation counts as {start}")
            if released and report["conversation_kept"]:
                raise Fault("a released conversation kept its row")
            self._diary.starts[start] += 1
            ids = ids + answer["output_ids"] + self._random(20)
            if self._draw.random() < 0.1:
                ids[self._draw.randrange(STEM)] = self._id()

    def read(self) -> None:
        """A long prompt that is compacted between the chunks of its prefill."""
        ids = self._ids(self._draw.randrange(300, 900))
        (answer,) = self._answers([ids], self._sampling(20, {"prompt": "compact"}))
        self._check(answer, 20)

    def choose(self) -> None:
        """A request with settings of its own, or none."""
        fields = self._draw.choice(
            [{"enabled": False}, {"budget": 32, "interval": 16}, {"interval": 8}, {"budget": 40, "recent": 0}]
        )
        tokens = self._length()
        (answer,) = self._answers([self._ids()], self._sampling(tokens, fields))
        report = self._check(answer, tokens)
        if not fields.get("enabled", True) and report["rounds"]:
            raise Fault("a request that declined compression had a round")

    def err(self) -> None:
        """A wrong field, which must be refused before anything is generated."""
        fields = self._draw.choice(BAD)
        body = {"input_ids": self._ids(), "sampling_params": self._sampling(20, fields)}
        body["stream"] = self._draw.random() < 0.5
        self._expect(self._session.post(f"{self._url}/generate", json=body, timeout=PATIENCE_S), 400)

    def flush(self) -> None:
        """Asks for an empty cache; a busy server refuses, which is right too."""
        answer = self._session.post(f"{self._url}/flush_cache", timeout=PATIENCE_S)
        if answer.status_code not in (200, 400):
            raise Fault(f"status {answer.status_code} to a flush")

    def _length(self) -> int:
        return self._draw.choice((10, 60, 120, 120, 250))

    def _id(self) -> int:
        return self._draw.randrange(3, self._vocabulary)

    def _random(self, count: int) -> list[int]:
        return [self._id() for _ in range(count)]

    def _ids(self, own: int = 12) -> list[int]:
        """A prompt: one of the shared beginnings, then `own` tokens."""
        stem = random.Random(self._draw.randrange(STEMS))
        return [stem.randrange(3, self._vocabulary) for _ in range(STEM)] + self._random(own)

    def _sampling(self, tokens: int, fields: dict | None = None, **sampling) -> dict:
        custom = {} if fields is None else {"custom_params": {"triattention": fields}}
        return {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True, **custom, **sampling}

    def _post(self, ids: list, sampling: dict, stream: bool = False, **body) -> requests.Response:
        body = {"input_ids": ids, "sampling_params": sampling, "stream": stream, **body}
        response = self._session.post(f"{self._url}/generate", json=body, stream=stream, timeout=PATIENCE_S)
        self._expect(response, 200)
        return response

    def _answers(self, ids: list, sampling: dict) -> list[dict]:
        return self._post(ids, sampling).json()

    def _expect(self, response: requests.Response, status: int) -> None:
        if response.status_code != status:
            raise Fault(f"status {response.status_code} instead of {status}: {response.text[:200]}")

    def _check(self, answer: dict, tokens: int) -> dict:
        """The report of a whole answer."""
        facts = answer["meta_info"]
        if facts["completion_tokens"] != tokens:
            raise Fault(f"{facts['completion_tokens']} tokens instead of {tokens}: {facts['finish_reason']}")
        report = facts["triattention"]
        evicted = report.get("conversation_evicted_tokens", report["evicted_tokens"])
        if report["logical_length"] - evicted != report["physical_length"]:
            raise Fault(f"a report that does not add up: {report}")
        self._diary.tokens += tokens
        return report
