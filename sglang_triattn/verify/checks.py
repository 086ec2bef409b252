"""The checks of `verify` by name, in the order of its table."""

from __future__ import annotations

from sglang_triattn.verify import checks_of_answers as answers
from sglang_triattn.verify import checks_of_memory as memory
from sglang_triattn.verify.finding import FAILED, Finding
from sglang_triattn.verify.traffic import Evidence

CHECKS = {
    "active": memory.active,
    "counters": memory.counters,
    "metrics": memory.metrics,
    "report": memory.report,
    "freed": memory.freed,
    "bound": memory.bound,
    "memory": memory.memory,
    "effect": answers.effect,
    "exact": answers.exact,
    "prefix cache": answers.prefix_cache,
    "frozen prefix": answers.frozen_prefix,
    "tree": answers.tree,
    "positions": answers.positions,
    "conversation": answers.conversation,
}


def judge(found: Evidence) -> dict[str, Finding]:
    """The finding of each check."""
    return {name: check(found) for name, check in CHECKS.items()}


def any_failed(findings: dict[str, Finding]) -> bool:
    """Whether a check failed; one that could not be made has not."""
    return any(finding.status == FAILED for finding in findings.values())
