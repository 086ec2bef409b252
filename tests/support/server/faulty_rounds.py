"""An SGLang plugin, only for tests: the next call of a named step of a compaction round raises.

Loaded through its own entry point (see `harness.install_plugin`). The file named by FAULT_FILE holds the step's name,
and "always" after it if every call is to raise; otherwise the file is emptied by the first that does.
"""

from __future__ import annotations

import os
import pkgutil
from pathlib import Path

PATCHES = "sglang_triattn.patches"
STEPS = {
    "plan": f"{PATCHES}.rounds.compressor:plan_round",
    "early rounds": f"{PATCHES}.rounds.compressor:early_rounds",
    "snapshot": f"{PATCHES}.rounds.compressor:snapshot",
    "lengths": f"{PATCHES}.rounds.compressor:shortened",
    "score": "sglang_triattn.kernels.scorer:Scorer.in_turn",
    "select": "sglang_triattn.kernels.scorer:select_torch",
    "move": "sglang_triattn.kernels.mover:move_torch",
    "close up": f"{PATCHES}.rounds.launches:Launch.close_up",
    "free": f"{PATCHES}.rounds.launches:Launch.emptied",
    "settle": f"{PATCHES}.rounds.recovery:Attempt.settle",
    "record": f"{PATCHES}.rounds.compressor:Compressor._record",
    "resume": f"{PATCHES}.scheduler.conversations:take_row",
    "park": f"{PATCHES}.scheduler.conversations:free_tail",
}


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_metrics_collector", plant, HookType.BEFORE)


def plant(*_, **__) -> None:
    """Wraps every step, once the package is loaded in the scheduler's process."""
    file = Path(os.environ["FAULT_FILE"])
    for step, place in STEPS.items():
        owner, _, name = place.rpartition("." if "." in place.partition(":")[2] else ":")
        holder = pkgutil.resolve_name(owner)
        setattr(holder, name, failing(step, getattr(holder, name), file))


def failing(step: str, real, file: Path):
    def call(*args, **kwargs):
        wanted = file.read_text()
        if wanted == step:
            file.write_text("")
        if wanted in (step, f"{step} always"):
            raise RuntimeError(f"planted in {step}")
        return real(*args, **kwargs)

    return call
