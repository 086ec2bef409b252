"""Which environment variables Python code reads: what has imported something may go on under another environment if it
would have read the same there."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from types import FrameType

# What compiled code reads, which nothing here sees.
NATIVE = (
    "ATEN_",
    "CUDA_",
    "GOMP_",
    "KMP_",
    "LD_",
    "MALLOC_",
    "MKL_",
    "OMP_",
    "OPENBLAS_",
    "PYTORCH_",
    "TORCH",
    "TRITON_",
)
# Functions that go through all variables in search of those that begin with these letters.
SEARCHES = {
    ("fsspec.config", "set_conf_env"): "FSSPEC",
    ("networkx.utils.backends", "_set_configs_from_environment"): "NETWORKX_",
    ("sglang.srt.environ", "_handle_deprecated_envs"): "SGL_",
    ("tqdm.utils", "envwrap"): "TQDM_",
}
PREFIXES = (*NATIVE, *SEARCHES.values())
# Read when these are imported, and of no effect there.
WITHOUT_EFFECT = {
    # By huggingface_hub and others, which keep nothing there offline; the package reads it whenever it looks there.
    "XDG_CACHE_HOME",
    # `forkserver.adopt_environment` does with it what Python does at its start.
    "PYTHONPATH",
    # torch writes its own default there in a process that first compiles something, or asks where it would go.
    "TORCHINDUCTOR_CACHE_DIR",
}
_WAY_THERE = ("os", "collections.abc")

read: set[str] = set()
"""Names that have been asked for since `record`, whether or not there was such a variable."""


class _Recorded(type(os.environ)):
    def __getitem__(self, name: str) -> str:
        if not _is_search(sys._getframe(1), name):
            read.add(name)
        return super().__getitem__(name)


def _is_search(frame: FrameType | None, name: str) -> bool:
    """Whether the function that asks passes over this name."""
    while frame is not None and frame.f_globals.get("__name__") in _WAY_THERE:
        frame = frame.f_back
    if frame is None:
        return False
    function = frame.f_globals.get("__name__"), frame.f_code.co_qualname.partition(".")[0]
    return function in SEARCHES and not name.startswith(SEARCHES[function])


def record() -> None:
    """Adds to `read` from now on."""
    os.environ.__class__ = _Recorded


def stop() -> None:
    os.environ.__class__ = _Recorded.__base__


def disagreeing(one: Mapping[str, str], other: Mapping[str, str], names: Collection[str]) -> list[str]:
    """Names among `names`, and those that count without being recorded, for which two environments differ."""
    counting = {name for name in (*one, *other) if name.startswith(PREFIXES)}
    return sorted(name for name in {*names, *counting} - WITHOUT_EFFECT if one.get(name) != other.get(name))
