"""A scheduler with many running requests and the hooks of compression, without a model.

SGLang's own requests, tree, allocator and rows; the compressor and its Triton kernels launch into a driver that does
nothing (`null_driver`). Tensors are small, so that what this machine computes in the place of a GPU takes little time;
requests are divided among launches as those of Qwen3-8B at the default budget are.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.common import MODELS
from benchmarks.overhead.census import FROZEN, scheduler_with
from benchmarks.overhead.null_driver import Skipped

LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 36, 4, 1, 128
BUDGET, INTERVAL = 16, 128
MAX_NEW_TOKENS = 4000
STEP = "Scheduler.get_next_batch_to_run", "ForwardBatch.init_new", "ModelRunner.sample"
"""What SGLang calls in each decode step of a model without window layers, and compression hooks."""
DRAFTED = "Scheduler.get_next_batch_to_run", "FutureMap.resolve_seq_lens_cpu", *["ForwardBatch.init_new"] * 3
"""The same with drafted tokens: the draft model's step, the verification, and the draft model's reading."""
VERIFIED = 4
"""Tokens per request of a step that verifies drafts."""


class RunningServer:
    """`requests` running requests; all have their prompt of `FROZEN` tokens from the tree.

    Args:
        rounds_per_step: as the flag.
        spread: whether the requests' rounds are due one after another, evenly over the interval; else all together.
        layers: of the model.
        kernels: whether rounds launch Triton kernels; else their references compute.
        content: whether K/V exist; without, the kernels must not run.

    Attributes:
        step: the hooks of a decode step.
        plain: the same functions without hooks.
        drafted: the hooks of a step with drafted tokens.
    """

    def __init__(
        self,
        requests: int,
        *,
        rounds_per_step: int | str = 0,
        spread: bool = False,
        layers: int = LAYERS,
        kernels: bool = True,
        content: bool = False,
    ) -> None:
        from sglang_triattn.config import Config
        from sglang_triattn.patches.compression import Compression
        from sglang_triattn.patches.request.compressed import attach_options
        from sglang_triattn.patches.rounds.compressor import Compressor
        from sglang_triattn.request.options import CompressionOptions
        from sglang_triattn.rounds.rules import complete

        row = FROZEN + BUDGET + INTERVAL + 1
        scheduler = self.scheduler = scheduler_with(requests, row, 2 * requests * row, 1, "cpu")
        scheduler.tp_group = scheduler.dp_tp_group = SimpleNamespace(world_size=1)
        scheduler.max_total_num_tokens = 2 * requests * row
        self.batch, self.requests = scheduler.running_batch, scheduler.running_batch.reqs
        self.config = complete(Config(budget=BUDGET, interval=INTERVAL, rounds_per_step=rounds_per_step))
        for request in self.requests:
            attach_options(request, CompressionOptions(self.config)).admit(FROZEN, None)
            request.sampling_params.max_new_tokens = MAX_NEW_TOKENS
        scorer, mover, self.kv = kernels_for(self.config, layers, 2 * requests * row if content else 1, kernels)
        compression = self.compression = Compression(self.config)
        compression._scheduler = scheduler
        compression._conversations.attach(scheduler)
        self.compressor = Compressor(scheduler, self.config, scorer, mover, compression._conversations)
        compression.compressor = self.compressor
        self.batch.forward_mode = mode()
        self.batch.batch_is_full = False
        self._shorten(spread)
        # SGLang's `free` copies its list of free slots: one launch on a GPU, milliseconds here. Steps are not charged.
        self._free, self.freed = scheduler.token_to_kv_pool_allocator.free_page_ids, []
        scheduler.token_to_kv_pool_allocator.free_page_ids = self.freed.append
        self.step, self.plain = self._step(STEP, [mode()]), self._step(STEP, [mode()], hooked=False)
        draft, verify, extend = mode(), mode("is_target_verify"), mode("is_draft_extend_v2")
        self.drafted = self._step(DRAFTED, [draft, verify, extend], drafts=True)

    def _shorten(self, spread: bool) -> None:
        """Cuts the rows to what a round leaves, or to what they hold some steps after one."""
        allocator, rows = self.scheduler.token_to_kv_pool_allocator, self.scheduler.req_to_token_pool.req_to_token
        for number, request in enumerate(self.requests):
            kv = request.kv
            length = FROZEN + BUDGET + (number * INTERVAL // len(self.requests) if spread else 0)
            allocator.free(rows[kv.req_pool_idx, length : kv.kv_committed_len].long())
            kv.kv_committed_len = kv.kv_allocated_len = length
        self.batch.seq_lens_cpu = torch.tensor([request.kv.kv_committed_len for request in self.requests])
        self.batch.seq_lens = self.batch.seq_lens_cpu.clone()
        self.batch.orig_seq_lens = self.batch.seq_lens.int()

    def _step(self, names: tuple[str, ...], modes: list, *, hooked: bool = True, drafts: bool = False) -> Callable:
        """A step that calls functions of these names, which do nothing themselves."""
        from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
        from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

        from sglang_triattn.patches.observability.reporting import reporting_streamer

        hooks = {".".join(hook.target.rsplit(".", 2)[1:]): hook for hook in self.compression.hooks()}
        batch = SimpleNamespace(**vars(self.batch)) if drafts else self.batch
        if drafts:
            batch.spec_info = SimpleNamespace(future_indices=torch.zeros(1))
        tokens = [len(self.requests) * (VERIFIED if index else 1) for index in range(len(modes))]
        forwards = [
            SimpleNamespace(forward_mode=each, positions=torch.zeros(count, dtype=torch.int64), mrope_positions=None)
            for each, count in zip(modes, tokens, strict=True)
        ]
        left = iter(forwards)
        calls = []
        for name in names:
            forward = next(left) if name == "ForwardBatch.init_new" else None
            original = (lambda *_, forward=forward: forward) if forward else lambda *_: None
            hook = hooks[name]
            function = _wrap_fn(original, hook.function, HookType(hook.kind)) if hooked else original
            given = {"Scheduler.get_next_batch_to_run": (self.scheduler, self.batch, self.batch)}
            given["ModelRunner.sample"] = (None, None, forwards[0])
            calls.append((function, given.get(name, (None, batch))))
        streamer = object.__new__(reporting_streamer(SchedulerOutputStreamer, lambda: None))
        reports = streamer.build_additional_customized_info if hooked else lambda _: {}

        def step() -> None:
            for function, arguments in calls:
                function(*arguments)
            start = time.thread_time_ns()
            # Before it asks for reports, SGLang looks at each request, which brings it into the processor's cache.
            for request in self.requests:
                request.finished()
            Skipped.nanoseconds += time.thread_time_ns() - start
            reports(self.requests)

        return step

    def decode(self) -> None:
        """What SGLang and the model do in a step: each request gets a token."""
        batch, scheduler = self.batch, self.scheduler
        if self.freed:
            self._free(torch.cat(self.freed))
            self.freed.clear()
        slots = scheduler.token_to_kv_pool_allocator.alloc(len(self.requests))
        rows = scheduler.req_to_token_pool.req_to_token
        rows[batch.req_pool_indices, batch.seq_lens_cpu] = slots.to(rows.dtype)
        batch.seq_lens_cpu, batch.seq_lens = batch.seq_lens_cpu + 1, batch.seq_lens + 1
        batch.orig_seq_lens = batch.orig_seq_lens + 1
        for request in self.requests:
            request.kv.kv_committed_len += 1
            request.kv.kv_allocated_len += 1
            request.output_ids.append(1)

    @property
    def rounds(self) -> int:
        """Rounds so far. Raises SystemExit if one has failed."""
        totals = self.compressor.totals
        if totals.failed_rounds:
            raise SystemExit(f"{totals.failed_rounds} rounds failed")
        return totals.rounds

    def held(self) -> list[torch.Tensor]:
        """[layers, K and V, tokens, KV heads, head_dim] of each request, along its row."""
        rows = self.scheduler.req_to_token_pool.req_to_token
        places = [rows[each.kv.req_pool_idx, : each.kv.kv_committed_len].long() for each in self.requests]
        return [torch.stack([torch.stack([k[place], v[place]]) for k, v in self.kv]) for place in places]


def mode(which: str = "is_decode") -> SimpleNamespace:
    """SGLang's ForwardMode, as far as hooks ask it."""
    names = "is_decode", "is_extend", "is_mixed", "is_target_verify", "is_draft_extend_v2"
    return SimpleNamespace(**{name: (lambda answer=name == which: answer) for name in names})


def kernels_for(config: Any, layers: int, slots: int, kernels: bool) -> tuple[Any, Any, list]:
    """(Scorer, Mover, K and V of each layer) for a pool of so many slots."""
    from sglang_triattn.kernels.mover import Mover
    from sglang_triattn.kernels.score.tables import build_tables
    from sglang_triattn.kernels.scorer import Scorer
    from sglang_triattn.kernels.workspace import WorkspacePlan

    random = torch.Generator().manual_seed(0)
    k, v = (
        [torch.randn(slots, KV_HEADS, HEAD_DIM, generator=random).bfloat16() for _ in range(layers)] for _ in range(2)
    )
    size = layers, Q_HEADS, HEAD_DIM // 2
    mean = torch.complex(torch.randn(size, generator=random), torch.randn(size, generator=random))
    tables = build_tables(
        mean, mean.abs() * 1.2, torch.rand(HEAD_DIM // 2, generator=random), 1.0, "half", KV_HEADS, "cpu"
    )
    width = config.budget + config.interval
    options = {"selection": config.selection, "value_share": config.value_share, "most_kept": config.budget}
    here = WorkspacePlan(layers, Q_HEADS, KV_HEADS, width, width, **options)
    per_launch, rest = served_division(), (config.budget, min(config.budget, config.interval))
    scorer = Scorer(
        k, tables, num_tokens=width, longest=width, limit=here.needs(per_launch, width, layers, *rest),
        v_buffers=v, kernels=kernels, **options,
    )  # fmt: skip
    if kernels and scorer.plan.launch(width, *rest)[0] != per_launch:
        raise SystemExit(f"{scorer.plan.launch(width, *rest)[0]} requests share a launch instead of {per_launch}")
    return scorer, Mover(k, v, kernels=kernels), list(zip(k, v, strict=True))


def served_division() -> int:
    """Requests of Qwen3-8B that share their launches, at the default settings."""
    from sglang_triattn.config import Config
    from sglang_triattn.kernels.workspace import WorkspacePlan
    from sglang_triattn.rounds.plan import most_kept
    from sglang_triattn.rounds.rules import complete

    model, config = MODELS[0], complete(Config())
    width = config.budget + config.interval
    plan = WorkspacePlan(
        model.layers, model.q_heads, model.kv_heads, width, width, selection=config.selection,
        value_share=config.value_share, most_kept=most_kept(config, width),
    )  # fmt: skip
    return plan.launch(width, config.budget, config.interval)[0]
