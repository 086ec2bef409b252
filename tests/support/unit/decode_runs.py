"""Small runs of the decode benchmark."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.decode import cli
from benchmarks.decode.model import SHAPES

SMALL = ["--device", "cpu", "--quick", "--batches", "3", "--contexts", "4096", "--budgets", "1024", "--memories", "0.5"]
TOY = SHAPES["Toy"]
"""The shape of the smallest model."""


def run_decode(out: Path, *options: str) -> dict:
    """What a run on the CPU writes to `out`."""
    cli.main([*SMALL, *options, "--json", str(out)])
    return json.loads(out.read_text())
