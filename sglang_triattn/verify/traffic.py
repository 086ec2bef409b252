"""The requests that `verify` sends, and what it notes of the server before, between and after them.

    |-- shared: head, mark, filler --|-- what one request adds --|-- generated ->

`mark` is random, so that no earlier run has left the prompt in the radix tree. All requests bring small budgets of
their own, so that rounds come within few tokens under all flags of the server.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import secrets
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from sglang_triattn.rounds.rules import RoundRules
from sglang_triattn.verify.client import Answer, Ask, Client, Load, State
from sglang_triattn.verify.expected_outcome import first_round, frozen_length, tokens_to_generate

BUDGET, INTERVAL, RECENT = 16, 8, 4
"""Of the requests, where the server's flags and its model's window allow so little."""
TRIES, PERIOD, SHORTEST, COPIED = 3, 16, 8, 96
"""Passages that are copied, their usual and least tokens, and the budget of these requests."""
SHARED, MARK, ADDED = 48, 8, 2
AFTER_ROUND = 8
"""Tokens that the request whose log-probabilities are compared generates after its first round."""
TOGETHER = 3
POLL_S, SETTLE_S = 0.05, 3.0
OFF = {"enabled": False}

TEXT = (
    "The old lighthouse keeper walked down to the harbour before sunrise, carrying a brass lantern, two green apples "
    "and a folded map of seven northern islands. Rain had washed the stone steps, and grey gulls were quarrelling over "
    "silver fish near the broken pier. He counted eleven wooden boats, painted blue, yellow or black, and wrote their "
    "names into a small leather book. No one else was awake, except the baker, whose oven warmed the narrow street "
    "beyond the chapel."
)


@dataclass
class Evidence:
    """All that the checks look at.

    Attributes:
        config: the server's settings, those of its first replica that compresses.
        page_size: slots per page.
        noise: largest difference, in nats, that equal requests may show in log-probabilities.
        before, after: the server without any of these requests.
        load_before, load_after: likewise.
        peak: most KV slots seen in use while `crowd` ran.
        shared: whether other requests were seen, or announced.
        tree: whether the server has a radix tree.
        prefix: the shared prompt.
        warm: the first request with it.
        probes: one request repeated, before and after others of its prefix had rounds.
        dense, small: the same request without compression and with a small budget.
        crowd: requests with rounds that ran at the same time, of all replicas.
        again: a request whose prompt is the whole text of a compacted one.
        passages: what the next three should go on copying, each its own; empty if the budget is too small, or the
            tokenizer knows too few words.
        dense_copies, copies, resumed: without compression, with it, and their conversations' next turns.
        seconds: time taken by each phase.
    """

    config: RoundRules
    page_size: int
    noise: float
    before: State
    load_before: Load
    shared: bool
    tree: bool
    prefix: list[int] = field(default_factory=list)
    passages: list[list[int]] = field(default_factory=list)
    dense_copies: list[Answer] = field(default_factory=list)
    copies: list[Answer] = field(default_factory=list)
    resumed: list[Answer] = field(default_factory=list)
    probes: list[Answer] = field(default_factory=list)
    crowd: list[Answer] = field(default_factory=list)
    peak: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    warm: Answer = field(init=False)
    dense: Answer = field(init=False)
    small: Answer = field(init=False)
    again: Answer = field(init=False)
    after: State = field(init=False)
    load_after: Load = field(init=False)

    @property
    def compressed(self) -> list[Answer]:
        """All answers to requests with rounds, but for the second turns of conversations."""
        return [self.small, *self.crowd, *self.copies]

    @property
    def exact_plan(self) -> bool:
        """Whether rounds ran only when they were due, so that token counts determine them."""
        early = self.after.total("pressure_rounds") - self.before.total("pressure_rounds")
        return not early and not any(answer.retractions for answer in self.compressed)

    def settings_of(self, answer: Answer) -> RoundRules:
        """The server's settings as a request changed them."""
        known = {"budget", "interval", "recent", "keep_share", "prompt"}
        changes = {name: value for name, value in answer.ask.control.items() if name in known}
        return dataclasses.replace(self.config, pressure_budget=None, **changes)

    def frozen_of(self, answer: Answer) -> int:
        """First KV entry that rounds of this request may have touched."""
        # A request finds whole pages of its prompt in the tree, but never the last token.
        cached = answer.cached if answer.ask.control.get("prompt") == "compact" else 0
        return frozen_length(self.settings_of(answer), len(answer.ask.ids), cached, self.page_size)


# Log-probabilities of equal requests may differ as batches do, in nats.
_NOISE = {"float32": 1e-4, "float": 1e-4, "float16": 0.02, "half": 0.02}
_LARGEST_NOISE = 0.1


def gather(client: Client, *, shared: bool) -> Evidence:
    """Sends all requests and returns what came of them.

    Args:
        shared: whether others are known to use the server.

    Raises:
        TriAttentionError: as `Client`.
    """
    before = client.state()
    info = before.info
    found = Evidence(
        config=config_of(next(replica for replica in before.replicas if replica)),
        page_size=info["page_size"],
        noise=_NOISE.get(info.get("dtype", ""), _LARGEST_NOISE),
        before=before,
        load_before=client.load(),
        shared=shared,
        tree=not info.get("disable_radix_cache"),
    )
    found.shared |= found.load_before.requests > 0
    replicas = range(len(before.replicas)) if info.get("dp_size", 1) > 1 else [None]
    script = _Script(client, found, replicas)
    for phase in (script.warm_up, script.twins, script.crowd, script.copies):
        start = time.monotonic()
        phase()
        found.seconds[phase.__name__] = round(time.monotonic() - start, 2)
        found.load_after = _settled(client, found)
        found.shared |= found.load_after.requests > 0
    found.after = client.state()
    return found


def config_of(replica: dict[str, Any]) -> RoundRules:
    """The settings that a replica reports."""
    names = {each.name for each in dataclasses.fields(RoundRules)}
    return RoundRules(**{name: value for name, value in replica.items() if name in names})


def _settled(client: Client, found: Evidence) -> Load:
    """The load once the last of these requests has left the server: no request runs, and no more is held than before.

    SGLang sends an answer's last token a step before it frees what the request held.
    """
    deadline = time.monotonic() + SETTLE_S
    load = client.load()
    while not found.shared and (load.requests or load.used > found.load_before.used) and time.monotonic() < deadline:
        time.sleep(POLL_S)
        load = client.load()
    return load


class _Script:
    """The phases in order; each adds to `found`."""

    def __init__(self, client: Client, found: Evidence, replicas: Sequence[int | None]) -> None:
        self._client, self._found, self._replicas = client, found, replicas
        config, page = found.config, found.page_size
        self._budget = min(max(BUDGET, config.window), config.budget)
        # Of whole pages if possible, so that every round frees some.
        self._interval = min(-(-INTERVAL // page) * page, config.interval)
        self._recent = min(max(RECENT, config.window), self._budget)
        if found.before.info.get("skip_tokenizer_init"):
            self._words = random.Random(0).sample(range(10, 250), 100)
        else:
            self._words = client.ids_of(TEXT)
        found.prefix = self._marked(-(-SHARED // page) * page)

    @property
    def _small(self) -> dict[str, Any]:
        return {"budget": self._budget, "interval": self._interval, "recent": self._recent, "prompt": "frozen"}

    def _mark(self, length: int) -> list[int]:
        return [secrets.choice(self._words[1:]) for _ in range(length)]

    def _marked(self, length: int) -> list[int]:
        """The text's first token, a mark, and as much of the text as fits."""
        start = [self._words[0], *self._mark(MARK)]
        return start + list(itertools.islice(itertools.cycle(self._words[1:]), length - len(start)))

    def _ask(self, *asks: Ask) -> list[Answer]:
        return self._client.ask(asks, self._replicas[0])

    def _tokens(self, control: dict[str, Any], prompt: list[int], least: int, cached: int = 0) -> int:
        settings = dataclasses.replace(self._found.config, pressure_budget=None, **control)
        frozen = frozen_length(settings, len(prompt), cached, self._found.page_size)
        return tokens_to_generate(settings, prompt=len(prompt), frozen=frozen, least=least)

    def warm_up(self) -> None:
        """Puts the shared prompt into the tree, and asks twice for log-probabilities that follow it."""
        found = self._found
        found.warm = self._ask(Ask(found.prefix, 1, self._small))[0]
        self._probe()
        self._probe()

    def _probe(self) -> None:
        """Copies the shared prompt, so that each of its tokens decides about one log-probability."""
        prefix = self._found.prefix
        self._found.probes += self._ask(Ask(prefix + prefix[1:], 1, OFF, logprobs_from=len(prefix)))

    def twins(self) -> None:
        """The same request without and with compression, one after the other, so that both run in batches of one."""
        found, control = self._found, self._small
        settings = dataclasses.replace(found.config, pressure_budget=None, **control)
        prompt = found.prefix
        frozen = frozen_length(settings, len(prompt), 0, found.page_size)
        least = first_round(settings, prompt=len(prompt), frozen=frozen) + AFTER_ROUND
        tokens = self._tokens(control, prompt, least)
        (found.dense,) = self._ask(Ask(prompt, tokens, OFF))
        (found.small,) = self._ask(Ask(prompt, tokens, control))

    def crowd(self) -> None:
        """Requests of different lengths at the same time, on every replica, while the memory in use is watched."""
        found, control = self._found, self._small
        trigger = self._budget + self._interval
        least = trigger + max(3 * self._interval, min(trigger, 64))
        prompts = [found.prefix + self._mark(ADDED) for _ in range(TOGETHER)]
        asks = [
            Ask(prompt, self._tokens(control, prompt, least + self._interval * place), control)
            for place, prompt in enumerate(prompts)
        ]
        with ThreadPoolExecutor(len(self._replicas)) as pool:
            running = [pool.submit(self._client.ask, asks, replica) for replica in self._replicas]
            while wait(running, timeout=POLL_S).not_done:
                found.peak = max(found.peak, self._client.load().used)
        found.crowd = [answer for done in running for answer in done.result()]
        first = found.crowd[0]
        (found.again,) = self._ask(Ask(first.ask.ids + first.output, 1, OFF))
        self._probe()
        for _ in range(2):
            # Other requests in the same batch change the last bits; a changed prefix stays changed.
            if found.probes[-1].prompt_logprobs != found.probes[0].prompt_logprobs:
                self._probe()

    def copies(self) -> None:
        """Passages that are repeated, and go on being repeated after rounds that leave the newest repetitions alone."""
        found = self._found
        budget = min(max(COPIED, found.config.window), found.config.budget)
        period = min(PERIOD, budget // 3)
        words = sorted(set(self._words[1:]))
        if period < SHORTEST or len(words) < TRIES * PERIOD:
            return
        words = random.Random(0).sample(words, TRIES * PERIOD)
        found.passages = [words[place * PERIOD :][:period] for place in range(TRIES)]
        # Without a share, older repetitions would stay.
        control = {"budget": budget, "interval": self._interval, "recent": budget, "prompt": "compact", "keep_share": 0}
        repeated = -(-(budget + self._interval) // period) + 2
        cached = len(found.prefix) if found.tree else 0
        tokens = self._tokens(control, found.prefix + self._mark(ADDED + repeated * period), 3 * self._interval, cached)
        name = f"sglang-triattn verify {secrets.token_hex(8)}"
        named = [{**control, "conversation": f"{name} {place}"} for place in range(TRIES)]

        def start(passage: list[int], control: dict[str, Any]) -> Ask:
            return Ask(found.prefix + self._mark(ADDED) + passage * repeated, tokens, control)

        dense = [start(passage, OFF) for passage in found.passages]
        small = [start(passage, control) for passage, control in zip(found.passages, named, strict=True)]
        answers = self._ask(*dense, *small)
        found.dense_copies, found.copies = answers[:TRIES], answers[TRIES:]
        last = [
            Ask(
                answer.ask.ids + answer.output + copied(passage, tokens, ADDED),
                tokens // 2,
                {**answer.ask.control, "release": True},
            )
            for answer, passage in zip(found.copies, found.passages, strict=True)
        ]
        found.resumed = self._ask(*last)


def copied(passage: Sequence[int], done: int, tokens: int) -> list[int]:
    """The passage's next `tokens` tokens after `done` tokens of its repetition."""
    return [passage[place % len(passage)] for place in range(done, done + tokens)]
