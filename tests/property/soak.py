"""Random histories for as long as you like: `make soak-properties`, STEPS=100000 by default.

Not collected by itself. SEED=n starts with other histories; the seed of a failure is printed.
"""

import itertools
import os
from collections import Counter

from histories import Histories, Repeating, run_histories

BATCH = 50
EXPECTED = {
    "steps",
    "histories",
    "rounds",
    "early rounds",
    "first rounds that came early",
    "prefill rounds",
    "rows cut before their newest tokens",
    "retractions",
    "resumed turns",
    "rows found by their tokens",
    "rows resumed before their end",
    "rows copied in case that a turn fails",
    "rounds of rows with inputs",
    "shared starts of compacted rows",
    "rows barred by SGLang",
    "stripped answers",
    "aborted prefills",
    "flushes granted",
    "flushes refused",
    "rows lost by flushes",
    "rows that outlived a refused flush",
    "unmaps",
}


def test_soak(capsys):
    """Prevents failures that only rare combinations of settings and events cause."""
    steps, first = int(os.environ.get("STEPS", 100_000)), int(os.environ.get("SEED", 1))
    counts = Counter()
    for seed in itertools.count(first):
        with capsys.disabled():
            print(f"\rseed {seed}: {counts['steps']:,} of {steps:,} steps", end="", flush=True)
            try:
                histories = Repeating if seed % 2 else Histories
                counts += run_histories(BATCH, start=seed, varied=True, histories=histories)
            except BaseException:
                print(f"\nviolated with SEED={seed}")
                raise
        if counts["steps"] >= steps:
            break
    with capsys.disabled():
        print(f"\r{'violations':>36}: 0" + " " * 20)
        for name in sorted(EXPECTED):
            print(f"{name:>36}: {counts[name]:,}")
    assert not EXPECTED - set(+counts), "something never happened, so that nothing was shown about it"
