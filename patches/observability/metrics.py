"""Prometheus counters of the compaction rounds, under `/metrics` with --enable-metrics.

SGLang part: `SchedulerMetricsCollector` (sglang/srt/observability/metrics_collector.py), whose labels are used.
"""

from __future__ import annotations

from sglang_triattn.rounds.plan import Totals

_COUNTERS = {
    "rounds": "Rounds of compaction, each of one request.",
    "evicted_tokens": "Tokens evicted from private suffixes.",
    "failed_rounds": "Rounds that failed; none of them is among the rounds.",
    "freed_slots": "KV slots given back to the allocator by rounds.",
}


class RoundMetrics:
    """Publishes what was added to the totals since the last call.

    Args:
        labels: the scheduler's own metric labels.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        # SGLang sets the multi-process folder before it builds a scheduler; prometheus_client reads it on import.
        from prometheus_client import Counter

        self._published = Totals()
        self._counters = {
            name: Counter(f"sglang:triattention_{name}_total", text, labelnames=list(labels)).labels(**labels)
            for name, text in _COUNTERS.items()
        }

    def publish(self, totals: Totals) -> None:
        for name, counter in self._counters.items():
            counter.inc(getattr(totals, name) - getattr(self._published, name))
            setattr(self._published, name, getattr(totals, name))
