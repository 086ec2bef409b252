"""Make `sglang_triattn` importable from this checkout where it is not installed.

For machines that have torch and Triton but not SGLang: `python -m pytest tests/gpu` and the benchmarks need only
`sglang_triattn`'s own logic and kernels, and no installer or network.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Makes the package importable from this checkout unless it is installed."""
    if importlib.util.find_spec("sglang_triattn") is None:
        sys.path.insert(0, str(ROOT))
