"""Benchmarks, run from the root of a checkout by `python -m benchmarks.NAME`; README.md lists them."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "tools"))

import checkout

# The package need not be installed.
checkout.make_importable()
