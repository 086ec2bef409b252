"""Rounds on a running batch. SGLang parts: the scheduler's streams and batch, row table, KV pool, allocator.

The safe point is the entry of `Scheduler.get_next_batch_to_run` for step n+1. There, with overlap scheduling,

- the result of step n-1 is processed, so that prompts are in the tree and finished requests are marked;
- step n is queued on the forward stream. It reads the rows' slots as they were, and its newest token's K/V is written
  when it runs. Everything that reads or writes K/V is therefore enqueued on the forward stream too, behind step n and
  ahead of step n+1;
- the schedule stream may rewrite a row as soon as step n has read it, which SGLang's own barrier has awaited
  (`Scheduler._apply_war_barrier`). What a round needs of the row is copied on the schedule stream first;
- freed slots may be handed out at once: whoever gets them writes them on the forward stream, in a later step, or, where
  a prompt comes back from host memory, on a stream that first waits for it (`HiCacheController.start_loading`).

Without overlap there is one stream and all of this is plain program order. Only token counts steer a round, and they
are known on the host, so nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from sglang_triattn.config import Config
from sglang_triattn.kernels.compact import needs_order, remap, unchanged_start
from sglang_triattn.kernels.mover import Mover
from sglang_triattn.kernels.scorer import Scorer
from sglang_triattn.kernels.select import SHARED
from sglang_triattn.patches.conversations import Conversations
from sglang_triattn.patches.prefill import resume_behind
from sglang_triattn.patches.pressure import early_rounds
from sglang_triattn.patches.requests import can_compact, free_tail, lengths_of, recent_of, settings_of, state_of
from sglang_triattn.rounds import FirstHole, Plan, Totals, plan_round


class Compressor:
    """Compacts the due requests of a scheduler, all of them in one pass.

    Args:
        scheduler: SGLang's Scheduler, fully built.
        config: the server's settings.
        scorer: reads the keys of the scheduler's KV pool.
        mover: moves what is in it; None where a round only rewrites rows, see `make_mover`.
        conversations: idle rows, which give way to running requests.
    """

    def __init__(
        self, scheduler: Any, config: Config, scorer: Scorer, mover: Mover | None, conversations: Conversations
    ) -> None:
        self.config = config
        self.totals = Totals()
        self._scheduler = scheduler
        self._scorer = scorer
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._rows = scheduler.req_to_token_pool.req_to_token
        self._page_size = self._allocator.page_size
        self._mover = mover
        self._conversations = conversations
        # With sets per head, each rank would let the tree have another part of a row.
        self._alike_on_ranks = config.selection in SHARED or scheduler.tp_group.world_size == 1

    def run_due_rounds(self, batch: Any, *, joining: Any = None, chunked: Any = None) -> None:
        """One round for every request that has outgrown its budget, or that must make room.

        Args:
            batch: SGLang's running ScheduleBatch.
            joining: the batch that was prefilled last and is about to join it, or None.
            chunked: the request whose prompt is prefilled chunk by chunk, or None.
        """
        due = self._plan(batch.reqs)
        pressed = early_rounds(self._scheduler, batch.reqs, joining, due, self._conversations.drop_one)
        due += pressed
        self.totals.pressure_rounds += len(pressed)
        rounds = [(batch.reqs[index], plan) for index, plan in due]
        between_chunks = self._plan_chunked(chunked)
        if between_chunks is not None:
            rounds.append((chunked, between_chunks))
        if not rounds:
            return
        for launch, group in grouped(rounds, self._launch_of).items():
            self._compact(*zip(*group, strict=True), *launch)
        if due:
            self._shorten(batch, due)
        if between_chunks is not None:
            resume_behind(chunked, between_chunks.new_length)

    def _launch_of(self, request: Any, plan: Plan) -> tuple[int, int, str]:
        """What rounds share a launch: private tokens that stay, newest ones among them, and the strategy."""
        strategy = "remap" if self._mover is None else strategy_for(settings_of(request))
        return plan.kept_private, recent_of(request), strategy

    def _compact(self, requests: Sequence[Any], plans: Sequence[Plan], keep: int, recent: int, strategy: str) -> None:
        """One round of requests that share a launch."""
        slots, facts = self._snapshot(requests, plans)
        _, frozen, lengths, next_positions = facts
        ordered = None
        with self._on_forward_stream(slots, facts):
            kept = self._scorer.keep(slots, lengths, next_positions, keep, recent)
            holes = read_later(frozen + unchanged_start(kept))
            if strategy == "remap":
                ordered = remap(slots, kept)
            else:
                self._mover.move(slots, kept, strategy)
        if ordered is not None:
            self._rewrite(plans, ordered, facts, keep)
        else:
            # The kept K/V has moved forward within each request's slots.
            for request, plan in zip(requests, plans, strict=True):
                free_tail(request.kv, plan.new_length, self._scheduler.tree_cache)
        for index, (request, plan) in enumerate(zip(requests, plans, strict=True)):
            self._record(request, plan, strategy, lambda index=index: holes()[index])

    def _plan(self, requests: Sequence[Any]) -> list[tuple[int, Plan]]:
        """(index, plan) of each due request."""
        due = []
        for index, request in enumerate(requests):
            if not can_compact(request):
                continue
            plan = plan_round(settings_of(request), **lengths_of(request, self._page_size))
            if plan is not None:
                due.append((index, plan))
        return due

    def _plan_chunked(self, request: Any) -> Plan | None:
        """The round that is due between two chunks of a prefill.

        What the tree may have of the row it gets first: SGLang would give it later in the same step.
        """
        if request is None or not can_compact(request) or request.extend_end <= request.prefix_len:
            return None
        settings = settings_of(request)
        if plan_round(settings, **lengths_of(request, self._page_size)) is None:
            return None
        self._scheduler.stash_chunked_request(request)
        # The tree may have taken tokens that counted as private.
        return plan_round(settings, **lengths_of(request, self._page_size))

    def _snapshot(self, requests: Sequence[Any], plans: Sequence[Plan]) -> tuple[torch.Tensor, torch.Tensor]:
        """A copy of the due rows' private parts, made on the schedule stream.

        Returns:
            slots [R, N] int32, right-padded with slots of the same row; facts [4, R] int64 on the device: row,
            first private position, private length, next position.
        """
        facts = self._to_device(
            [
                [request.kv.req_pool_idx for request in requests],
                [plan.frozen for plan in plans],
                [plan.private_length for plan in plans],
                [plan.next_position for plan in plans],
            ]
        )
        row, frozen, length, _ = facts.unsqueeze(-1)
        longest = max(plan.private_length for plan in plans)
        column = torch.arange(longest, device=self._rows.device)
        slots = self._rows[row, frozen + column.minimum(length - 1)]
        return slots, facts

    def _rewrite(self, plans: Sequence[Plan], ordered: torch.Tensor, facts: torch.Tensor, keep: int) -> None:
        """Puts the kept slots first in each row and frees the others; no K/V moves."""
        self._await_forward_stream(ordered)
        row, frozen, _, _ = facts.unsqueeze(-1)
        column = torch.arange(keep, device=self._rows.device)
        self._rows[row, frozen + column] = ordered[:, :keep]
        evicted = [ordered[r, keep : plan.private_length] for r, plan in enumerate(plans)]
        self._allocator.free(torch.cat(evicted).long())

    def _record(self, request: Any, plan: Plan, strategy: str, first_hole: FirstHole) -> None:
        """Books the round with the request; from here on the tree must never take its row as a whole."""
        state = state_of(request)
        state.add_hole(first_hole if self._alike_on_ranks else lambda: 0)
        state.rounds += 1
        state.evicted_tokens += plan.evicted_tokens
        state.freed_slots += plan.freed_slots
        state.mixed_length = plan.new_length if strategy == "fill" else min(state.mixed_length, plan.new_length)
        self.totals.add(plan)
        request.kv.kv_committed_len = request.kv.kv_allocated_len = plan.new_length
        request.skip_radix_cache_insert = True

    def _shorten(self, batch: Any, due: list[tuple[int, Plan]]) -> None:
        """Lowers the batch's physical lengths; `orig_seq_lens` stays, it is the logical length.

        The length tensors are replaced, never written: queued work still refers to the old ones.
        """
        evicted = [0] * len(batch.seq_lens_cpu)
        for index, plan in due:
            evicted[index] = plan.evicted_tokens
        batch.seq_lens_cpu = batch.seq_lens_cpu - torch.tensor(evicted, dtype=batch.seq_lens_cpu.dtype)
        batch.seq_lens = batch.seq_lens - self._to_device(evicted)
        batch.seq_lens_sum = None
        # SGLang reopens admission only when a request leaves; here memory came back without one leaving.
        batch.batch_is_full = False

    def _to_device(self, values: list) -> torch.Tensor:
        device = self._rows.device
        host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)

    def _on_forward_stream(self, *borrowed: torch.Tensor) -> AbstractContextManager:
        """Context in which work is enqueued behind the queued step; `borrowed` tensors stay allocated for it."""
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            return nullcontext()
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        for tensor in borrowed:
            if tensor.is_cuda:
                tensor.record_stream(scheduler.forward_stream)
        return scheduler.forward_stream_ctx

    def _await_forward_stream(self, *borrowed: torch.Tensor) -> None:
        """Lets the schedule stream use tensors made on the forward stream."""
        scheduler = self._scheduler
        if not scheduler.enable_overlap:
            return
        scheduler.schedule_stream.wait_stream(scheduler.forward_stream)
        for tensor in borrowed:
            if tensor.is_cuda:
                tensor.record_stream(scheduler.schedule_stream)


def make_mover(config: Config, page_size: int, pool: Any, *, kernels: bool | None = None) -> Mover | None:
    """What moves K/V in SGLang's KV pool `pool`.

    None where a round moves nothing: slots can be freed one by one, and all heads keep the same tokens.
    """
    if page_size == 1 and config.selection in SHARED:
        return None
    return Mover(*kv_buffers(pool), kernels=kernels)


def strategy_for(settings: Config) -> str:
    """How kept K/V moves: by the strategy that copies least, unless later rounds rely on the order."""
    return "slide" if needs_order(settings.recent, settings.interval) else "fill"


def grouped(rounds: Sequence[tuple[Any, Plan]], key: Callable[[Any, Plan], tuple]) -> dict[tuple, list]:
    """Rounds by what `key` says of them: one group, unless requests or frozen prefixes make a difference."""
    groups: dict[tuple, list[tuple[Any, Plan]]] = {}
    for request, plan in rounds:
        groups.setdefault(key(request, plan), []).append((request, plan))
    return groups


def kv_buffers(pool: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Key and value buffers of SGLang's KV pool, per layer [num_slots, H_kv, head_dim]."""
    layers = range(pool.start_layer, pool.start_layer + pool.layer_num)
    return [pool.get_key_buffer(layer) for layer in layers], [pool.get_value_buffer(layer) for layer in layers]


def read_later(values: torch.Tensor) -> Callable[[], list[int]]:
    """Starts a copy of a small device tensor to the host; calling the result waits for it, which by then is done."""
    if not values.is_cuda:
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[int]:
        copied.synchronize()
        return host.tolist()

    return read
