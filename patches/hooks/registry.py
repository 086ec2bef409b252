"""Hooks in SGLang's registry: either all of them apply, or the launch stops.

SGLang's HookRegistry logs a hook that it cannot apply and carries on without it, which here would mean a server that
runs uncompressed while its user believes otherwise. So every target is checked before it is hooked (does it exist, with
the parameters that the hook was written for?) and afterwards (did the registry apply it?).
"""

from __future__ import annotations

from collections.abc import Sequence

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook, check_target, check_version, resolve
from sglang_triattn.patches.hooks.hook_search import search_once

ONLY_THIS = "SGLANG_PLUGINS=triattention,triattention_cpu"


def register(hooks: Sequence[Hook]) -> None:
    """Checks and registers `hooks`; SGLang applies them once all plugins are loaded.

    Raises:
        TriAttentionError: SGLang is another version, or a target is missing or has other parameters.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    for hook in hooks:
        check_target(hook)
    search_once()
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
