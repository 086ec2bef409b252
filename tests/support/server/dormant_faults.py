"""An SGLang plugin, only for tests: faults that sleep in a real server until a file names one of them.

Loaded like `step_probe`. The file named by FAULT_FILE is read whenever a fault might strike. Each fault replaces
something that the package looks up at run time, and is a slip that a check of `sglang-triattn verify` must find.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import torch


def activate() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    places = {
        "sglang.srt.managers.scheduler.Scheduler.__init__": plant,
        "sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new": shift_positions,
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len": find_nothing,
    }
    for target, function in places.items():
        HookRegistry.register(target, function, HookType.AFTER)


def awake(fault: str) -> bool:
    return Path(os.environ["FAULT_FILE"]).read_text() == fault


def shift_positions(forward, _, batch, *__, **___) -> None:
    from sglang_triattn.patches.request.compressed import settings_of

    if not forward.forward_mode.is_decode():
        return
    if awake("positions are places in the row"):
        forward.positions = forward.positions - (batch.orig_seq_lens - batch.seq_lens)
    if awake("requests within the budget are altered"):
        forward.positions = (
            forward.positions + torch.tensor([settings_of(req) is not None for req in batch.reqs]).long()
        )


def find_nothing(longest: int, *_, **__) -> int:
    return 0 if awake("no prefix is ever found") else longest


def plant(_, scheduler, *__, **___) -> None:
    """Replaces what the faults need, once the scheduler is built."""
    from sglang_triattn.patches.observability.metrics import RoundMetrics
    from sglang_triattn.patches.request.row import CompressedRow
    from sglang_triattn.patches.rounds import compressor
    from sglang_triattn.patches.rounds.compressor import Compressor
    from sglang_triattn.patches.scheduler import release
    from sglang_triattn.patches.scheduler.conversations import Conversations
    from sglang_triattn.request.lifecycle import CompressedRequest
    from sglang_triattn.request.row_record import RowRecord
    from sglang_triattn.rounds.plan import Report, Totals

    put(Totals, "add", "the sums stand still", lambda real, *rest: None)
    put(Totals, "add", "rounds are counted twice", lambda real, *rest: [real(*rest), real(*rest)])
    put(RoundMetrics, "_publish_sums", "the metrics stand still", lambda real, metrics: None)
    put(Report, "to_dict", "reports are exchanged", exchange_reports)
    put(CompressedRequest, "round", "fewer slots are freed than tokens evicted", count_too_few)
    put(compressor, "plan_round", "rounds come too early", plan_early)
    put(CompressedRow, "wait_until_due", "rounds come too early", lambda real, *rest: None)
    put(Compressor, "_give_back", "freed slots are lost", lose_slots)
    put(Compressor, "_compact", "a round writes to the prefix", poison)
    put(RowRecord, "exact_prefix_len", "the tree takes compacted rows", lambda real, record: 1_000_000)
    put(Conversations, "acquire", "no conversation is resumed", lambda real, *rest: False)
    put(Conversations, "commit", "a conversation resumes another row", mix_up_row)
    # Rounds that are only reported.
    publish = RoundMetrics._publish_sums
    RoundMetrics._publish_sums = lambda metrics: [
        published.__setitem__(slice(None), (metrics, metrics._totals)),
        publish(metrics),
    ]
    only_reported = "rounds are reported and not done"
    put(compressor, "compactable_row", only_reported, lambda real, *rest: None)
    put(release, "report_on", only_reported, lambda real, *req: make_up(real(*req), *req))


def put(owner: object, name: str, fault: str, function) -> None:
    """Makes `owner.name(...)` call `function(real, ...)` while the fault is awake."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **more: (function if awake(fault) else _as_it_was)(real, *args, **more))


def _as_it_was(real, *args, **more):
    return real(*args, **more)


last_report: list[dict] = [{}]
published: list = []


def exchange_reports(real, report) -> dict:
    last_report.append(real(report))
    return last_report.pop(0)


def count_too_few(real, owner, plan, *rest) -> None:
    real(owner, plan, *rest)
    owner.freed_slots -= 1


def plan_early(real, config, **lengths):
    return real(dataclasses.replace(config, interval=max(config.interval // 2, 1)), **lengths)


class Sink:
    """An allocator to which slots never come back."""

    def free_page_ids(self, ids: torch.Tensor) -> None:
        pass

    def available_size(self) -> int:
        return 0


def lose_slots(real, compressor, *rest) -> None:
    whole, compressor._allocator = compressor._allocator, Sink()
    try:
        real(compressor, *rest)
    finally:
        compressor._allocator = whole


def poison(real, compressor, attempt, batches) -> None:
    """Overwrites the keys of one token of the shared prompt."""
    real(compressor, attempt, batches)
    pool = compressor._scheduler.token_to_kv_pool_allocator.get_kvcache()
    for row, _ in attempt.rounds:
        slot = compressor._rows[row.kv.req_pool_idx, 20].long()
        for keys in pool.k_buffer:
            keys[slot] = keys[slot].flip(-1)


def mix_up_row(real, conversations, request, room) -> None:
    """Reverses the values of a resumed row."""
    real(conversations, request, room)
    scheduler, kv = conversations._scheduler, request.kv
    if request.prefix_len > kv.cache_protected_len and request.prefix_len == kv.kv_allocated_len:
        rows = scheduler.req_to_token_pool.req_to_token
        slots = rows[kv.req_pool_idx, kv.cache_protected_len : kv.kv_allocated_len].long()
        for values in scheduler.token_to_kv_pool_allocator.get_kvcache().v_buffer:
            values[slots] = values[slots.flip(0)]


def make_up(report, req, page_size: int):
    """The report of rounds that were due and did not run; adds them to the sums."""
    from sglang_triattn.patches.request.compressed import frozen_of, settings_of
    from sglang_triattn.verify.expected_outcome import replay

    settings = settings_of(req)
    if settings is None:
        return report
    prompt, frozen = len(req.origin_input_ids), frozen_of(req, settings, page_size)
    due = replay(settings, prompt=prompt, frozen=frozen, logical=report.logical_length, page_size=page_size)
    if not due.rounds:
        return report
    # Rounds are due in a step only, at whose start both were called.
    metrics, sums = published
    for name in ("rounds", "evicted_tokens", "freed_slots"):
        setattr(sums, name, getattr(sums, name) + getattr(due, name))
    metrics._publish_sums()
    return dataclasses.replace(report, **dataclasses.asdict(due))
