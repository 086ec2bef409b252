"""A Triton driver without a GPU: kernels are compiled for sm_90, launched by Triton as on a GPU, and not run.

What Triton and the callers of its kernels cost the host is all there, up to the call of CUDA's own launch function. To
check the arguments that launches are given, they can be run by Triton's interpreter instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver, interpreter
from triton.runtime.jit import JITFunction

LAUNCHES: Counter[str] = Counter()
"""Launches of each kernel so far."""


class Skipped:
    """Thread CPU time of what stands in for a GPU or for SGLang, which steps are not charged."""

    nanoseconds = 0


def first_indices(kept: torch.Tensor, holes: torch.Tensor, num_kept: int, MARK: bool, **_: object) -> None:
    """Stands in for `keep_kernel`: keeps each row's first tokens."""
    if not MARK:
        kept.view(-1, num_kept).copy_(torch.arange(num_kept))
        holes.fill_(num_kept)


STAND_INS: dict[str, Callable[..., None]] = {"keep_kernel": first_indices}
"""By name of a kernel, what writes results that later operations of torch take for indices; called with its arguments
by name."""

INTERPRETED = {"WIDEN": True}
"""Compile-time arguments that kernels need under the interpreter, which cannot multiply bfloat16."""


class NullUtils:
    """What Triton asks of a driver when it loads a kernel."""

    def load_binary(self, name: str, kernel: bytes, shared: int, device: int) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and most threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448, "multiprocessor_count": 132, "warpSize": 32}


class NullLauncher:
    """Launches one compiled kernel: counts, and does nothing else."""

    interprets = False

    def __init__(self, source: Any, metadata: Any) -> None:
        self._function, self._name = source.fn, source.fn.__name__
        self._stand_in = STAND_INS.get(self._name)

    def __call__(self, x, y, z, stream, function, packed, metadata, enter, leave, *arguments) -> None:
        LAUNCHES[self._name] += 1
        if NullLauncher.interprets:
            named = dict(zip(self._function.arg_names, arguments, strict=True))
            named |= {name: value for name, value in INTERPRETED.items() if name in named}
            interpreted(self._function).run(**named, grid=(x, y, z), warmup=False)
        elif self._stand_in is not None:
            start = time.thread_time_ns()
            self._stand_in(**dict(zip(self._function.arg_names, arguments, strict=True)))
            Skipped.nanoseconds += time.thread_time_ns() - start


class NullDriver:
    """Triton's view of an H100 that is not there."""

    utils = NullUtils()
    launcher_cls = NullLauncher
    binary_ext = "cubin"

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> None:
        return None

    def assemble_tensormap_to_arg(self, *arguments: object) -> tuple[object, ...]:
        return arguments


@contextmanager
def null_driver() -> Iterator[None]:
    """Context in which Triton launches kernels into nothing."""
    before = driver._active
    driver.set_active(NullDriver())
    try:
        yield
    finally:
        # `reset_active` would ask for the driver of a GPU, which may be missing.
        driver._active = before


@contextmanager
def interpreting() -> Iterator[None]:
    """Context in which each launch is run by Triton's interpreter, with the arguments that the launcher was given."""
    before = JITFunction.__call__
    # Kernels call other functions of Triton's; compiled, they have no meaning in Python.
    JITFunction.__call__ = call_interpreted
    NullLauncher.interprets = True
    try:
        yield
    finally:
        NullLauncher.interprets = False
        JITFunction.__call__ = before


def call_interpreted(function: JITFunction, *given: Any, **named: Any) -> Any:
    """Calls a function of Triton's inside a kernel, as `InterpretedFunction.__call__` does.

    That leaves the language bound to the interpreter, so that no kernel can be compiled afterwards.
    """
    scope = interpreter._patch_lang(function.fn)
    try:
        return interpreted(function).rewrite()(*given, **named)
    finally:
        scope.restore()


def interpreted(function: JITFunction) -> interpreter.InterpretedFunction:
    return interpreter.InterpretedFunction(function.fn)
