"""What a check found, and how answers are compared."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_triattn.verify.client import Answer

PASSED, FAILED, NOT_TESTED = "passed", "failed", "not tested"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        status: PASSED, FAILED or NOT_TESTED.
        detail: what was seen, for people.
    """

    status: str
    detail: str


def passed(detail: str) -> Finding:
    return Finding(PASSED, detail)


def failed(detail: str) -> Finding:
    return Finding(FAILED, detail)


def not_tested(reason: str) -> Finding:
    return Finding(NOT_TESTED, reason)


def difference(one: Answer, other: Answer, first: int, last: int) -> float:
    """Largest difference between the log-probabilities of generated tokens [first, last), in nats.

    Where the answers part, it is how much likelier one found its own token than the other's: nothing if both were as
    likely, infinite if the other's was not even among its likeliest. What follows cannot be compared.
    """
    largest = 0.0
    for place in range(first, min(last, len(one.output), len(other.output))):
        token, other_token = one.output[place], other.output[place]
        if token != other_token:
            gaps = [
                one.logprobs[place] - one.others[place].get(other_token, -math.inf),
                other.logprobs[place] - other.others[place].get(token, -math.inf),
            ]
            return max(largest, *map(abs, gaps))
        largest = max(largest, abs(one.logprobs[place] - other.logprobs[place]))
    return largest


def largest_gap(one: list[float], other: list[float]) -> float:
    """Largest difference between two lists of log-probabilities, in nats; infinite if one has more of them."""
    if len(one) != len(other):
        return math.inf
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0)
