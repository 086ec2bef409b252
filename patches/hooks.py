"""Hooks into SGLang: either all of them apply, or the launch stops.

SGLang's HookRegistry logs a hook that it cannot apply and carries on without it, which here would mean a server that
runs uncompressed while its user believes otherwise. So every target is checked before it is hooked (does it exist, with
the parameters that the hook was written for?) and afterwards (did the registry apply it?).
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sglang_triattn import __version__
from sglang_triattn.errors import TriAttentionError

SGLANG_VERSION = "0.5.23"
ONLY_THIS = "SGLANG_PLUGINS=triattention,triattention_cpu"
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
    """

    target: str
    kind: str
    function: Callable
    parameters: str

    @property
    def expected(self) -> list[str]:
        return self.parameters.split()


def register(hooks: Sequence[Hook]) -> None:
    """Checks and registers `hooks`; SGLang applies them once all plugins are loaded.

    Raises:
        TriAttentionError: SGLang is another version, or a target is missing or has other parameters.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from sglang_triattn.patches import bindings

    check_version()
    for hook in hooks:
        check_target(hook)
    bindings.search_once()
    for hook in hooks:
        HookRegistry.register(hook.target, hook.function, HookType(hook.kind))


def install(hooks: Sequence[Hook]) -> None:
    """Registers hooks and applies them at once, for hooks that are needed only if compression is enabled.

    Skips hooks that are already in place.

    Raises:
        TriAttentionError: as `register` does, if another plugin hooks a target, or if a hook is not in place
            afterwards.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    new = [hook for hook in hooks if not in_place(hook)]
    for hook in new:
        if hook.target in HookRegistry._patched:
            # The registry patches a target once, with the hooks known at that time.
            raise TriAttentionError(
                f"Another plugin already hooks {hook.target}, which sglang-triattn must hook too: start the server "
                f"without that plugin ({ONLY_THIS})."
            )
    register(new)
    HookRegistry.apply_hooks()
    check_in_place(hooks)


def check_in_place(hooks: Sequence[Hook]) -> None:
    """Raises TriAttentionError naming the first hook that SGLang did not apply."""
    for hook in hooks:
        if not in_place(hook):
            raise TriAttentionError(
                f"SGLang did not apply the hook on {hook.target}, without which compression would be wrong: see its "
                f"log for the reason, and start the server without other plugins ({ONLY_THIS})."
            )


def in_place(hook: Hook) -> bool:
    """Whether a call of the target now runs through the hook."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered = any(function is hook.function for _, function, _ in HookRegistry._hooks.get(hook.target, ()))
    return registered and hook.target in HookRegistry._patched and hasattr(resolve(hook.target), "__wrapped__")


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
            f"SGLang has no usable {hook.target} ({why}), which sglang-triattn must hook: reinstall "
            f"sglang=={SGLANG_VERSION}.",
        ) from error
    if found != hook.expected:
        raise TargetError(
            CHANGED,
            f"takes ({', '.join(found)}), not ({', '.join(hook.expected)})",
            f"{hook.target} takes ({', '.join(found)}), but sglang-triattn was written for "
            f"({', '.join(hook.expected)}): reinstall sglang=={SGLANG_VERSION}, and remove any plugin that "
            "replaces this function.",
        )


def resolve(target: str) -> Callable:
    """The function behind a dotted path; for a classmethod or staticmethod, the plain function."""
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
