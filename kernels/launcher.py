"""Launches of one Triton kernel with fixed compile-time arguments.

Triton looks a compiled kernel up by the types of all arguments, in each launch anew: 4 to 13 microseconds (measured on
a CPU, Triton 3.8.0), more than the rest of a launch. Kernels here are specialised on no argument's value, so one
compiled kernel serves all.
"""

from __future__ import annotations

from typing import Any


class Launcher:
    """Launches one kernel, and remembers what Triton compiled.

    Args:
        kernel: a function that `triton.jit` made, specialised on no run-time value.
        settings: its compile-time arguments and launch settings.

    All launches must be on one device, with tensors of the same dtypes.
    """

    def __init__(self, kernel: Any, settings: dict[str, Any]) -> None:
        self._kernel, self._settings = kernel, settings
        self._compiled: Any = None
        self._constants: list = []

    def __call__(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """Launches the kernel with all its run-time arguments, in order."""
        if self._compiled is not None:
            self._compiled[grid](*arguments, *self._constants)
            return
        # Triton's interpreter compiles nothing, and returns None.
        self._compiled = self._kernel[grid](*arguments, **self._settings)
        if self._compiled is not None:
            self._constants = [self._settings[name] for name in self._kernel.arg_names[len(arguments) :]]
