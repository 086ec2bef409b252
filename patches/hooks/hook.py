"""A hook into SGLang, and whether the installed SGLang has the function that it is for."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_triattn import __version__
from sglang_triattn.errors import TriAttentionError

SGLANG_VERSION = "0.5.23"
SERVICER_VERSION = "0.14.1"
"""Of SMG's gRPC server, a package that SGLang requires: the newest that the hooks were tested with."""
MISSING, CHANGED = "missing", "changed"


class TargetError(TriAttentionError):
    """A target is MISSING, or CHANGED: it takes other parameters than the hook was written for.

    Attributes:
        status: which of them.
        found: what is there instead, without advice.
    """

    def __init__(self, status: str, found: str, message: str) -> None:
        super().__init__(message)
        self.status, self.found = status, found


@dataclass(frozen=True)
class Hook:
    """One hook.

    Attributes:
        target: dotted path of an SGLang function or method.
        kind: "before", "after" or "around"; see sglang/srt/plugins/hook_registry.py for what `function` receives.
        function: the hook.
        parameters: names of the target's parameters in order, `self` or `cls` included.
        why: what the hook does, one clause without a subject.
    """

    target: str
    kind: str
    function: Callable
    parameters: str
    why: str

    @property
    def package(self) -> str:
        """What to install for the target."""
        servicer = self.target.startswith("smg_grpc_servicer.")
        return f"smg-grpc-servicer=={SERVICER_VERSION}" if servicer else f"sglang=={SGLANG_VERSION}"

    @property
    def expected(self) -> list[str]:
        return self.parameters.split()


def check_version() -> None:
    """Raises TriAttentionError unless the installed SGLang is the version that the hooks were written for."""
    import sglang

    if sglang.__version__ != SGLANG_VERSION:
        raise TriAttentionError(
            f"sglang-triattn {__version__} works with sglang {SGLANG_VERSION}, but {sglang.__version__} is "
            f"installed: run `pip install sglang=={SGLANG_VERSION}`."
        )


def check_target(hook: Hook) -> None:
    """Raises TargetError unless the hook's target exists with the expected parameters."""
    try:
        function = resolve(hook.target)
        found = list(inspect.signature(function).parameters)
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise TargetError(
            MISSING,
            why,
            f"SGLang has no usable {hook.target} ({why}), which sglang-triattn must hook: reinstall {hook.package}.",
        ) from error
    if found != hook.expected:
        raise TargetError(
            CHANGED,
            f"takes ({', '.join(found)}), not ({', '.join(hook.expected)})",
            f"{hook.target} takes ({', '.join(found)}), but sglang-triattn was written for "
            f"({', '.join(hook.expected)}): reinstall {hook.package}, and remove any plugin that "
            "replaces this function.",
        )


def resolve(target: str) -> Callable:
    """The function that a dotted path names; for a classmethod or staticmethod, the plain function."""
    owner_path, name = target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner_path)
    attribute = inspect.getattr_static(owner, name)
    return getattr(attribute, "__func__", attribute)


@contextmanager
def replaced(owner: object, name: str, value: object) -> Iterator[None]:
    """Sets an attribute temporarily."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
