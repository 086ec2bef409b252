"""Small runs of gpu_decode.py."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from checkout import ROOT

FOLDER = ROOT / "benchmarks"
SMALL = ["--device", "cpu", "--quick", "--batches", "3", "--contexts", "4096", "--budgets", "1024", "--memories", "0.5"]


class Parts:
    """The files of benchmarks/ by name, importable for the duration of a test."""

    def __init__(self, monkeypatch) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))

    def __call__(self, name: str):
        return importlib.import_module(name)

    def toy(self):
        """The shape of the smallest model."""
        return self("decode_model").SHAPES["Toy"]

    def run(self, out: Path, *options: str) -> dict:
        """What a run on the CPU writes to `out`."""
        self("gpu_decode").main([*SMALL, *options, "--json", str(out)])
        return json.loads(out.read_text())
