"""With level rounds, requests that arrive together do not have their rounds together."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

import harness
import lengths_probe
from harness import BUDGET, INTERVAL, assert_pool_is_whole, compression, prompt
from sets import wide

TOGETHER, TOKENS = 20, BUDGET + 4 * INTERVAL


def rounds_by_step(batches: list[dict[str, int]]) -> list[int]:
    """How many rows are shorter in a batch than in the one before."""
    return [sum(now[rid] < before[rid] for rid in now.keys() & before.keys()) for before, now in pairwise(batches)]


@pytest.mark.parametrize(
    ("flags", "most"),
    [((), 8), wide(("--page-size", "16"), 8), wide(("--triattention-rounds-per-step", "3"), 3)],
)
def test_a_burst_is_level(serve, tmp_path, flags, most):
    """Prevents a step that waits for the rounds of all requests that arrived together, and rounds that come late."""
    harness.install_plugin(tmp_path, "lengths_probe", Path(lengths_probe.__file__).read_text())
    file = tmp_path / "lengths.jsonl"
    client = serve(*flags, env={"PYTHONPATH": harness.python_path(tmp_path), "PROBE_FILE": str(file)})
    file.write_text("")
    with ThreadPoolExecutor(TOGETHER) as pool:
        answers = list(pool.map(lambda number: client.generate(prompt(number, 40), TOKENS), range(TOGETHER)))
    batches = harness.read_lines(file)
    found = Counter(rounds_by_step(batches))
    reports = [compression(answer) for answer in answers]
    assert max(found) <= most, found
    assert sum(count * steps for count, steps in found.items()) <= sum(report["rounds"] for report in reports)
    # The bound stays: a row never holds more than prompt, budget and interval, and a page of its own end.
    assert max(length for batch in batches for length in batch.values()) <= 40 + BUDGET + INTERVAL + 16
    for report in reports:
        assert 3 <= report["rounds"] <= 5
        assert report["physical_length"] + report["evicted_tokens"] == report["logical_length"]
    assert_pool_is_whole(client)
    serve.stop(client)
