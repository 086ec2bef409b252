"""A pytest plugin that spares Triton's interpreter looking for what it has already replaced.

For each call of one kernel function by another, the interpreter searches all of `triton.language` for functions to
replace, which takes most of the time of a small kernel. Here only the first such call of a launch does.
"""

from __future__ import annotations

from types import FunctionType

from triton.runtime import interpreter

LANGUAGE = (interpreter.tl, interpreter.tl.core)
search = interpreter._patch_lang


class Launch:
    """What has been replaced since a kernel was launched; the launch calls `restore` at its end."""

    running: Launch | None = None

    def __init__(self) -> None:
        self._scopes = []
        self._searched = []
        Launch.running = self

    def search(self, function: FunctionType) -> None:
        known = list(function.__globals__.values())
        modules = [module for module in LANGUAGE if any(module is value for value in known)]
        if any(module not in self._searched for module in modules):
            self._scopes.append(search(function))
            self._searched += modules

    def restore(self) -> None:
        Launch.running = None
        while self._scopes:
            self._scopes.pop().restore()


def search_once(function: FunctionType) -> Launch:
    launch = Launch.running or Launch()
    launch.search(function)
    return launch


interpreter._patch_lang = search_once
