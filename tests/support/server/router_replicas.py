"""What tests ask of replicas of SGLang's router."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from harness import Client, prompt

ROUNDS_S = 300
# Prompts after which all replicas have each had one, under any policy of the router.
MOST_PREFIXES = 12


def wait_for_rounds(replicas: Sequence[Client], rounds: int) -> None:
    """Waits until the replicas have had so many rounds in all."""
    deadline = time.monotonic() + ROUNDS_S
    while sum(replica.totals()["rounds"] for replica in replicas) < rounds:
        assert time.monotonic() < deadline, "no rounds"
        time.sleep(0.05)


def cached_after_prefixes(router: Client, rounds: Callable[[], list[int]], length: int) -> list[dict]:
    """Answers to prompts with prefixes of this length that other prompts have brought to all replicas.

    `rounds` returns how many each replica has had. Which one gets a prompt that none knows is the router's choice; it
    spreads those that come at once.
    """
    before = rounds()
    stems: list[list[int]] = []
    with ThreadPoolExecutor(len(before)) as pool:
        while any(now == then for now, then in zip(rounds(), before, strict=True)):
            assert len(stems) < MOST_PREFIXES, "a replica gets no requests"
            new = [prompt(10 + len(stems) + n, length) for n in range(len(before))]
            list(pool.map(lambda ids: router.generate(ids, 110), new))
            stems += new
    return [router.generate([*stem, *prompt(30 + n, 10)], 110) for n, stem in enumerate(stems)]
