"""Calibration inside a fully built scheduler: the model runs in SGLang, as it is served.

So any model that SGLang serves can be measured, with its quantisation and tensor parallelism. What reaches an attention
layer is the query that meets the cached keys, after any query norm and after RoPE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from sglang_triattn.calibration.job import SAVE_EVERY_TOKENS, CalibrationError, CalibrationJob, check_count
from sglang_triattn.calibration.lookups import check_no_latents
from sglang_triattn.calibration.query_sums import QuerySums, Sums, join_heads, join_layers, join_runs
from sglang_triattn.calibration.resume import Progress, load_progress, save_progress
from sglang_triattn.model.fingerprint import shown_name
from sglang_triattn.patches.calibration.capture import absorb_in, capture
from sglang_triattn.patches.calibration.lookups import fit_lookups, text_length
from sglang_triattn.patches.model.eager_batch import EagerBatch, eager, on_forward_stream
from sglang_triattn.patches.model.layers import UnsupportedModel, attention_layers, numbers_of, scored_layers
from sglang_triattn.patches.model.served_shape import served_shape
from sglang_triattn.patches.ranks.pipeline import broadcast_from_first_rank, from_last_stage, is_first, is_staged
from sglang_triattn.stats.file import ModelShape, QueryStats

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_triattn.patches.sglang_types import Scheduler

TRACES_AT_ONCE = 8


def calibrate_scheduler(
    scheduler: Scheduler, job: CalibrationJob, on_progress: Callable[[int, int], object] | None = None
) -> QueryStats:
    """Measures the query statistics of the model that `scheduler` serves.

    Call it on every rank of every stage, in a scheduler that is built and runs no requests yet. It leaves pools and
    tree as they were. The caller removes the job's `partial` file once the statistics are safe.

    Args:
        scheduler: SGLang's Scheduler, or anything with its pools, tree, streams, model_config and tp_worker.
        job: the same on every rank.
        on_progress: called after each forward pass with the number of tokens done and the most that there will be.

    Returns:
        Statistics of all query heads of the model, the same on every rank.

    Raises:
        CalibrationError: with one sentence, if the model, its settings or a text cannot be used.
    """
    runner = scheduler.tp_worker.model_runner
    try:
        shape = served_shape(scheduler)
        layers = scored_layers(attention_layers(runner.model))
    except UnsupportedModel as error:
        path = runner.model_config.model_path
        raise CalibrationError(
            f"The model {path} cannot be calibrated, because {error.reason}: use another model."
        ) from error
    _check_room(scheduler, job)
    check_no_latents(runner.model_config.model_path, job, any(layer.latent for layer in layers))
    length = text_length(job, room_of(scheduler))
    own, turns = numbers_of(layers), dict(zip(shape.layers, shape.rotates, strict=True))
    reads = [own.index(layer.number) for layer in layers]
    sums = QuerySums(shape.rope, [turns[number] for number in own], reads, absorb_in(layers))
    free = _free(scheduler)
    run = _Run(scheduler, job, sums, on_progress)
    with on_forward_stream(scheduler), eager(runner):
        with capture(layers, sums, lambda: run.batch.positions + shape.first_position):
            total = run.run()
        weights = None
        if job.lookup_texts:
            weights = fit_lookups(scheduler, job, layers, shape, length, run.report)
    if _free(scheduler) != free:
        raise RuntimeError(f"calibration changed the free slots and rows from {free} to {_free(scheduler)}")
    check_count(total.count)
    return _statistics(runner.model_config, shape, total, weights)


class _Run:
    """The passes of one job on one rank; every rank makes the same decisions.

    Attributes:
        batch: the one whose passes run.
    """

    batch: EagerBatch

    def __init__(
        self, scheduler: Scheduler, job: CalibrationJob, sums: QuerySums, on_progress: Callable | None
    ) -> None:
        self._scheduler = scheduler
        self._job = job
        self._sums = sums
        self._first = is_first(scheduler)
        self._on_progress = on_progress or (lambda done, most: None)
        self._done_tokens = 0
        self._unsaved = 0
        self._before = Progress()

    def run(self) -> Sums:
        job = self._job
        # Only the first rank is sure to see the file.
        self._before = broadcast_from_first_rank(self._scheduler, load_progress(job) if self._first else Progress())
        unit = self._before.done
        self._done_tokens = sum(map(job.tokens_of, range(unit)))
        while unit < job.units:
            if unit < len(job.windows):
                self._run_window(job.windows[unit])
                unit += 1
            else:
                first_trace = unit - len(job.windows)
                count = _traces_at_once(self._scheduler, job, first_trace)
                self._run_traces(first_trace, count)
                unit += count
            if self._unsaved >= SAVE_EVERY_TOKENS and unit < job.units:
                self._save(unit)
        return self._total()

    def _run_window(self, ids: Sequence[int]) -> None:
        self.batch = batch = EagerBatch(self._scheduler, [ids])
        try:
            batch.prefill()
        finally:
            batch.close()
        self._end_pass(len(ids))

    def _run_traces(self, first: int, count: int) -> None:
        """Lets the model continue `count` prompts, and measures every pass, each with its whole context visible."""
        job = self._job
        prompts = job.prompts[first : first + count]
        samplers = [_Sampler(job, first + index) for index in range(count)]
        ends = self._scheduler.model_config.hf_eos_token_id or set()
        self.batch = batch = EagerBatch(self._scheduler, prompts)
        try:
            logits = batch.prefill()
            self._end_pass(sum(map(len, prompts)))
            for _ in range(job.trace_tokens):
                tokens = self._choose(samplers, logits)
                left = [index for index, token in enumerate(tokens) if token not in ends]
                if not left:
                    break
                if len(left) < len(tokens):
                    batch.keep(left)
                    samplers = [samplers[index] for index in left]
                logits = batch.decode([tokens[index] for index in left])
                self._end_pass(len(left))
        finally:
            batch.close()

    def _choose(self, samplers: Sequence[_Sampler], logits: torch.Tensor) -> list[int]:
        """The next token of each trace, chosen on one rank because logits may differ in the last bits."""
        tokens: list[int] = []
        if self._scheduler.tp_group.rank_in_group == 0 and self._scheduler.pp_group.is_last_rank:
            rows = logits.float().cpu()
            tokens = [sampler.choose(row) for sampler, row in zip(samplers, rows, strict=True)]
        return from_last_stage(self._scheduler, tokens)

    def report(self, tokens: int) -> None:
        """Reports that `tokens` more are done."""
        self._done_tokens += tokens
        self._on_progress(self._done_tokens, self._job.tokens + self._job.lookup_tokens)

    def _end_pass(self, tokens: int) -> None:
        self._sums.end_pass(tokens)
        self._unsaved += tokens
        self.report(tokens)

    def _save(self, unit: int) -> None:
        total = self._total()
        if self._first:
            save_progress(self._job, Progress(unit, total))
        self._unsaved = 0

    def _total(self) -> Sums:
        """Sums over all layers, all heads and all tokens so far."""
        # With attention data parallelism, all groups measure the same texts: their passes must be of equal size.
        parts = self._scheduler.dp_tp_group.all_gather_object(self._sums.read())
        whole = None if parts[0] is None else join_heads(parts)
        if whole is not None and is_staged(self._scheduler):
            whole = join_layers(self._scheduler.pp_group.all_gather_object(whole))
        return join_runs(whole, self._before.sums)


class _Sampler:
    """Chooses the tokens of one trace, independently of the other traces in its batch."""

    def __init__(self, job: CalibrationJob, trace: int) -> None:
        self._temperature = job.temperature
        self._generator = torch.Generator().manual_seed(job.seed * 1_000_003 + trace)

    def choose(self, logits: torch.Tensor) -> int:
        """Chooses the next token.

        Args:
            logits: [vocabulary] float32 on the CPU.
        """
        if not torch.isfinite(logits).any() or torch.isnan(logits).any():
            raise CalibrationError("The model computes NaN or infinite logits: choose another --dtype.")
        if self._temperature == 0:
            return int(logits.argmax())
        chances = torch.softmax(logits / self._temperature, dim=-1)
        return int(torch.multinomial(chances, 1, generator=self._generator))


def _free(scheduler: Scheduler) -> tuple[int, int]:
    """Free slots and rows."""
    return scheduler.token_to_kv_pool_allocator.available_size(), scheduler.req_to_token_pool.available_size()


def room_of(scheduler: Scheduler) -> int:
    """Most tokens of a window, or of a prompt and its trace, in `scheduler`."""
    return min(*_room(scheduler).values(), _chunk(scheduler))


def _room(scheduler: Scheduler) -> dict[str, int]:
    return {
        "the KV pool": scheduler.max_total_num_tokens - scheduler.page_size,
        "the context length": scheduler.model_config.context_len,
    }


def _check_room(scheduler: Scheduler, job: CalibrationJob) -> None:
    """Raises CalibrationError unless every unit fits into the pools and the model's context."""
    room = _room(scheduler)
    place, limit = min((room | {"a prefill chunk": _chunk(scheduler)}).items(), key=lambda item: item[1])
    window = max(map(len, job.windows), default=0)
    if window > limit:
        raise CalibrationError(f"Windows of {window} tokens exceed {place} of {limit} tokens: use --window {limit}.")
    place, limit = min(room.items(), key=lambda item: item[1])
    prompt = max(map(len, job.prompts), default=0)
    if prompt and prompt + job.trace_tokens > limit:
        raise CalibrationError(
            f"Prompts of {prompt} tokens and traces of {job.trace_tokens} exceed {place} of {limit} tokens: use "
            f"--self-tokens {max(limit - prompt, 0)}."
        )


def _chunk(scheduler: Scheduler) -> int:
    """Most tokens of one prefill."""
    return scheduler.chunked_prefill_size or scheduler.max_prefill_tokens


def _traces_at_once(scheduler: Scheduler, job: CalibrationJob, first: int) -> int:
    """How many traces from `first` on may run together; at least one."""
    prompts = job.prompts[first : first + TRACES_AT_ONCE]
    longest = max(map(len, prompts))
    room = min(
        scheduler.max_total_num_tokens // (longest + job.trace_tokens + scheduler.page_size),
        scheduler.max_running_requests,
        _chunk(scheduler) // longest,
    )
    return max(1, min(len(prompts), room))


def _statistics(model_config: ModelConfig, shape: ModelShape, total: Sums, lookups: torch.Tensor | None) -> QueryStats:
    mean, abs_mean, unrotated = total.means()
    return QueryStats(
        mean=mean,
        abs_mean=abs_mean,
        num_kv_heads=shape.num_kv_heads,
        head_dim=total.head_dim,
        rope=shape.rope,
        fingerprint=shape.fingerprint,
        token_count=total.count,
        source=f"of {model_config.model_path}",
        layers=shape.layers,
        rotates=shape.rotates,
        unrotated_mean=unrotated,
        rotary_start=shape.rotary_start,
        model=shown_name(model_config.model_path),
        lookups=lookups,
    )
