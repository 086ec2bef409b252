"""Make `sglang_triattn` importable from this checkout where it is not installed.

For machines that have torch and Triton but not SGLang: `python -m pytest tests/gpu` and the benchmarks need only
`sglang_triattn`'s own logic and its kernels, and neither an installer nor a network.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Imports the installed package, or else this checkout's, whose sub-packages lie beside it (see pyproject.toml)."""
    try:
        if importlib.util.find_spec("sglang_triattn.kernels") is not None:
            return
    except ModuleNotFoundError:
        sys.path.insert(0, str(ROOT))
    import sglang_triattn

    sglang_triattn.__path__.append(str(ROOT))
