"""How seldom running requests are looked at, without a late round."""

import random

import pytest

from request_cases import CONFIG, REPORT
from sglang_triattn.patches.request.compressed import attach_options, compression_of
from sglang_triattn.patches.rounds.due import LONGEST, DueLooks
from sglang_triattn.request.options import CompressionOptions


class Request:
    """A running request with a round due once it has grown by `left` tokens; `ahead` if a step was counted early."""

    def __init__(self, left: int) -> None:
        self.left, self.ahead = left, False
        self.beam_group, self.skip_radix_cache_insert = None, False
        attach_options(self, CompressionOptions(CONFIG)).admit(10, None)
        compression_of(self).wait_until(left, 0)

    def grow(self, draw: random.Random, tokens: int) -> None:
        counted = draw.choice([1, 1, 1, 0 if self.ahead else 2])
        self.ahead ^= counted != 1
        self.left -= sum(draw.randrange(tokens + 1) for _ in range(counted))


def look(looks: DueLooks, running: list[Request]) -> list[Request]:
    """One step: those that were looked at."""
    found = [running[index] for index in looks.of_step(running)]
    for request in found:
        looks.again(request, max(request.left, 0))
    return found


@pytest.mark.parametrize("tokens", [1, 4])
def test_no_due_request_is_missed(tokens):
    """Prevents late rounds, with requests that join, leave, come back, change places and have rounds."""
    draw = random.Random(tokens)
    for _ in range(30):
        looks, running, away = DueLooks(tokens), [], []
        for _ in range(300):
            if draw.random() < 0.1:
                running.insert(draw.randrange(len(running) + 1), Request(draw.randrange(200)))
            if away and draw.random() < 0.05:
                running.append(away.pop())
                running[-1].left = draw.randrange(50)
            elif running and draw.random() < 0.05:
                away.append(running.pop(draw.randrange(len(running))))
            seen = look(looks, running)
            assert [request for request in running if request.left <= 0 and request not in seen] == []
            assert seen == sorted(seen, key=running.index)
            for request in seen:
                if request.left <= 0 and draw.random() < 0.9:
                    request.left = draw.randrange(1, 200)
            for request in running:
                request.grow(draw, tokens)


def test_few_requests_are_looked_at():
    """Prevents work in every step for every running request, of which hardly any has a round."""
    looks, running = DueLooks(), [Request(128 * (number + 1)) for number in range(100)]
    assert look(looks, running) == running
    assert looks.changed
    seen = 0
    for _ in range(100):
        for request in running:
            request.left -= 1
        seen += len(look(looks, running))
        assert not looks.changed
    # One in LONGEST steps for each.
    assert 0 < seen < 100 * (100 // LONGEST + 1)


def test_another_row_is_looked_at():
    """Prevents a late round of a request that was retracted and admitted again between two steps."""
    looks, running = DueLooks(), [Request(1000), Request(1000)]
    look(looks, running)
    compression_of(running[1]).retract(REPORT)
    assert look(looks, running) == []
    compression_of(running[1]).admit(10, None)
    assert look(looks, running) == running[1:]
    assert looks.changed
    compression_of(running[1]).wait_until(1000, 0)
    assert look(looks, running) == []
    assert not looks.changed


def test_everything_is_looked_at_once_after_a_failure():
    """Prevents requests that were not looked at because planning failed, and are never looked at again."""
    looks, running = DueLooks(), [Request(1000), Request(50)]
    look(looks, running)
    assert look(looks, running) == []
    looks.forget()
    assert look(looks, running) == running


def test_a_request_that_has_ended_is_let_go():
    """Prevents ended requests from being referred to for as long as their next round would have been away."""
    looks, running = DueLooks(), [Request(10_000_000)]
    look(looks, running)
    for _ in range(LONGEST):
        look(looks, [])
    assert not any(looks._looks.values())
