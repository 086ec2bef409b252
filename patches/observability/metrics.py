"""Prometheus metrics of compression, under `/metrics` with --enable-metrics.

SGLang parts: `SchedulerMetricsCollector` and `TokenizerMetricsCollector` (metrics_collector.py in
sglang/srt/observability), whose labels are used, and which may replace the classes of prometheus_client. As there,
prometheus_client is imported late: SGLang first sets the folder through which its processes put their metrics together.

A step without a round costs two comparisons. Counters and histograms are published at rounds, gauges when SGLang
publishes its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_triattn.kernels.round_times import RoundTimes, timing_events
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.observability.running import held_tokens, running
from sglang_triattn.request.options import REASONS

if TYPE_CHECKING:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager
    from sglang.srt.observability.metrics_collector import SchedulerMetricsCollector, TokenizerMetricsCollector

    from sglang_triattn.patches.rounds.compressor import Compressor
    from sglang_triattn.patches.scheduler.conversations import Conversations
    from sglang_triattn.patches.sglang_types import Scheduler

PREFIX = "sglang:triattention_"
COUNTERS = {
    "rounds_total": "Rounds of compaction, each of one request.",
    "evicted_tokens_total": "Tokens evicted from private suffixes.",
    "freed_slots_total": "KV slots given back to the allocator by rounds.",
    "pressure_rounds_total": "Rounds that ran early because memory was short.",
    "failed_rounds_total": "Rounds that failed; none of them is among the rounds.",
    "moved_bytes_total": "Most bytes of K/V that rounds may have copied.",
    "conversations_resumed_total": "Turns that resumed the row of their conversation.",
}
REFUSED, STOPPED = "refused_requests_total", "stopped"
GAUGES = {
    "physical_tokens": "KV entries that running requests hold.",
    "logical_tokens": "KV entries that running requests would hold without compression.",
    "held_ratio": "Physical over logical tokens of running requests; 1 while none run.",
    "conversations_parked": "Rows that wait for the next turn of their conversation.",
}
_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)
HISTOGRAMS = {
    "round_host_seconds": ("Time that the host spends on the rounds of a step.", _SECONDS),
    "round_device_seconds": ("Time that the device spends on the rounds of a step.", _SECONDS),
    "round_requests": ("Requests that have a round in the same step.", (1, 2, 4, 8, 16, 32, 64, 128, 256)),
}


class RoundMetrics:
    """Metrics of one scheduler; times the rounds of `compressor`.

    Args:
        collector: SGLang's own.
    """

    def __init__(
        self,
        collector: SchedulerMetricsCollector,
        scheduler: Scheduler,
        compressor: Compressor,
        conversations: Conversations,
    ) -> None:
        self._scheduler, self._totals, self._conversations = scheduler, compressor.totals, conversations
        self._published = dict.fromkeys(COUNTERS, 0)
        counter, gauge, histogram = (
            getattr(collector, f"_{kind.lower()}_cls") or _prometheus(kind)
            for kind in ("Counter", "Gauge", "Histogram")
        )
        labels = collector.labels
        given: dict[str, Any] = {"labelnames": list(labels)}
        self._counters = {
            name: counter(PREFIX + name, text, **given).labels(**labels) for name, text in COUNTERS.items()
        }
        # As SGLang's gauges: of several processes with the same labels, the one that wrote last.
        given["multiprocess_mode"] = "mostrecent"
        self._gauges = {name: gauge(PREFIX + name, text, **given).labels(**labels) for name, text in GAUGES.items()}
        del given["multiprocess_mode"]
        self._histograms = {
            name: histogram(PREFIX + name, text, buckets=buckets, **given).labels(**labels)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        self._times = compressor.times = RoundTimes(
            timing_events(compressor.device),
            self._histograms["round_host_seconds"].observe,
            self._histograms["round_device_seconds"].observe,
        )
        self.publish()

    def after_step(self) -> None:
        """Publishes what the rounds of a step have added up to; called after every step."""
        if self._times.outstanding:
            self._times.poll()
        rounds = self._totals.rounds - self._published["rounds_total"]
        if rounds:
            self._histograms["round_requests"].observe(rounds)
            self._publish_sums()

    def publish(self) -> None:
        """Publishes all sums and gauges; called when SGLang publishes its own."""
        self._publish_sums()
        physical, logical = held_tokens(running(self._scheduler))
        values = physical, logical, physical / logical if logical else 1.0, self._conversations.parked
        for gauge, value in zip(self._gauges.values(), values, strict=True):
            gauge.set(value)

    def _publish_sums(self) -> None:
        for name, counter in self._counters.items():
            value = self._sum(name)
            if value != self._published[name]:
                counter.inc(value - self._published[name])
                self._published[name] = value

    def _sum(self, name: str) -> int:
        if name == "conversations_resumed_total":
            return self._conversations.resumed
        return getattr(self._totals, name.removesuffix("_total"))


def scheduler_hooks(read: Callable[[], RoundMetrics | None]) -> list[Hook]:
    """Hooks for the scheduler process; `read()` returns its metrics, if it has any yet."""

    def publish_with_sglang(*_: object, **__: object) -> None:
        metrics = read()
        if metrics is not None:
            metrics.publish()

    target = "sglang.srt.observability.metrics_collector.SchedulerMetricsCollector.log_stats"
    return [Hook(target, "after", publish_with_sglang, "self stats", why="sets gauges when SGLang sets its own")]


class Refusals:
    """Counts requests that the main process refuses, by reason."""

    def __init__(self) -> None:
        self._counters: dict[str, Any] = {}
        target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_metric_collector_watchdog"
        # Made once: of a second launch in this process, it is recognised as the one that is in place.
        self._hook = Hook(
            target, "after", self._on_collector, "self", why="adds counts of refusals to SGLang's own metrics"
        )

    def hooks(self) -> list[Hook]:
        return [self._hook]

    def count(self, reason: str) -> None:
        """Counts a refusal; does nothing without metrics."""
        if self._counters:
            self._counters[reason].inc()

    def _on_collector(self, _: object, manager: TokenizerManager) -> None:
        if not manager.enable_metrics:
            return
        collector: TokenizerMetricsCollector = manager.metrics_collector
        kind = collector._counter_cls or _prometheus("Counter")
        text = "Requests refused because of what they ask of compression."
        counter = kind(PREFIX + REFUSED, text, labelnames=[*collector.labels, "reason"])
        self._counters = {reason: counter.labels(**collector.labels, reason=reason) for reason in REASONS}


def _prometheus(kind: str) -> Any:
    import prometheus_client

    return getattr(prometheus_client, kind)
