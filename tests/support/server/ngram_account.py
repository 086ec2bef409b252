"""Servers that draft from the text itself (NGRAM), and answers of theirs held to an account."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness import Client, compression, served_logprobs
from oracle import TOLERANCE, Oracle

DRAFTED = 6
NGRAM = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(DRAFTED))
# SGLang drafts trees, and chains where pages are larger than one slot.
PAGES = {1: ("--page-size", "1"), 16: ("--page-size", "16", "--speculative-ngram-max-bfs-breadth", "1")}
OVERLAP = {"overlap": (), "overlap off": ("--disable-overlap-schedule",)}
FAVOUR = 30.0
"""What favoured tokens have on top of their logits: an answer then consists of them alone."""


def favouring(tokens: Sequence[int]) -> dict[str, Any]:
    """Sampling parameters for answers of a few tokens, so that some of what is drafted from them holds."""
    return {"logit_bias": {str(token): FAVOUR for token in tokens}} if tokens else {}


def computed_before(steps: list[dict], prompt_length: int) -> list[int]:
    """How many tokens of a request were computed before each step that verifies drafts; each rank reports each step.

    With overlap, a step reports the start of the one before it: the first step, that of the prefill.
    """
    starts = {request["known"] - 1 for step in steps for request in step["requests"]}
    return sorted(start for start in starts if start >= prompt_length)


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        response: of the server.
        rounds: that it had.
        runs: of each step that verified drafts, how many tokens were computed before and after it.
    """

    response: dict[str, Any]
    rounds: int
    runs: list[tuple[int, int]]

    @property
    def output(self) -> list[int]:
        """Its tokens."""
        return self.response["output_ids"]

    @property
    def accepted(self) -> list[int]:
        """Tokens by which each step but the last took the answer on."""
        return [end - start for start, end in self.runs[:-1]]


def answer_by_account(
    client: Client,
    steps: Callable[[], list[dict]],
    account: Oracle,
    page_size: int,
    schedule: str,
    ids: list[int],
    tokens: int,
    favoured: Sequence[int] = (),
    flush: bool = True,
    ask: Callable[..., dict[str, Any]] | None = None,
    others: Sequence[Oracle] = (),
) -> Answer:
    """Serves one request, and holds its log-probabilities and rounds to an account.

    Args:
        client, steps: of a server with a probe, which chooses no token by its value.
        schedule: one of OVERLAP.
        favoured: tokens of which the answer consists; empty for any.
        flush: whether it first empties the tree, so that nothing of the prompt is cached.
        ask: `ask(tokens, **sampling)` serves the request, if its ids do not say all of it.
        others: accounts that must not fit, in addition to that of a server without rounds.
    """
    if flush:
        client.flush()
    steps()
    sampling = favouring(favoured)
    response = ask(tokens, **sampling) if ask else client.generate(ids, tokens, logprobs=True, **sampling)
    report, frozen = compression(response), len(ids) - len(ids) % page_size
    assert report["frozen_length"] == frozen
    everything = ids + response["output_ids"][:-1]
    done = computed_before(steps(), len(ids))
    assert done[0] == len(ids)
    runs = list(zip(done, [*done[1:], len(everything)], strict=True))

    overlap = schedule == "overlap"
    round_to = page_size if overlap or account.window else 1
    settings = {"value_share": 0.0, "round_to": round_to, "overlap": overlap}
    values, top = served_logprobs(response)

    def differ(account: Oracle, **more: Any) -> tuple[float, int]:
        account = replace(account, **settings, **more)
        expected, rounds = account.logprobs(everything, len(ids), frozen, pauses=runs, late=overlap)
        expected[:, list(favoured)] += FAVOUR
        expected = expected.log_softmax(-1)
        return (expected.gather(1, top) - values).abs().max().item(), rounds

    error, rounds = differ(account)
    assert report["rounds"] == rounds
    assert error < TOLERANCE
    wrong = [differ(account, budget=10_000), *map(differ, others)]
    assert min(error for error, _ in wrong) > 50 * TOLERANCE
    return Answer(response, rounds, runs)
