"""Finds the statistics of the served model: in the file that the user named, in the cache, or by measuring them now.

SGLang part: `Scheduler` (sglang/srt/managers/scheduler.py), built but not yet serving.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from contextlib import nullcontext
from importlib import resources
from typing import TYPE_CHECKING, Any

import torch
from tqdm import tqdm

from sglang_triattn.calibration.job import CalibrationError, CalibrationJob
from sglang_triattn.calibration.lookups import lookup_inputs
from sglang_triattn.calibration.prompts import trace_prompts
from sglang_triattn.calibration.texts import read_windows
from sglang_triattn.config import AUTO, Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fingerprint import shown_name, with_look_ups
from sglang_triattn.patches.calibration.measure import calibrate_scheduler, room_of
from sglang_triattn.patches.ranks.pipeline import broadcast_from_first_rank, is_first, is_staged
from sglang_triattn.stats.cache import keep_stats, load_cached, measuring_alone, why_not_kept
from sglang_triattn.stats.file import ModelShape, QueryStats, check_stats, load_stats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)

TEXT = "data/calibration.txt"
MAX_TOKENS = 16384
WINDOW = 2048
TRACES = 8
TRACE_TOKENS = 256
# What is measured on shorter texts than this says nothing about a model's queries.
LEAST_ROOM = 64

MEASURED = "measured at launch"

# A rehearsal to estimate how long the rest will take.
_PROBE_WINDOW = 256
_PROBE_TRACE_TOKENS = 6
_PROBE_STEPS = 3


def find_stats(scheduler: Scheduler, config: Config, shape: ModelShape) -> QueryStats:
    """Statistics that fit the served model; every rank of every stage calls this.

    Args:
        config: names a file, or has them come from the per-user cache, or else from the loaded model, which is measured
            now, and cached; those that hold look-up weights have a file of their own there.

    Raises:
        TriAttentionError: the file does not fit the model, or the model cannot be measured.
    """
    if not config.measures:
        stats = load_stats(config.stats)
        if stats.rope is None:
            logger.warning(
                "TriAttention turns keys back by the served model's own RoPE frequencies, because %s holds none: "
                "nothing in it shows whether it was measured with this model",
                config.stats,
            )
        return check_stats(stats, shape)
    weighed = config.fits_lookups
    if weighed:
        shape = dataclasses.replace(shape, variant=with_look_ups(shape.variant))
    first, random = is_first(scheduler), has_random_weights(scheduler)
    # Only the first rank looks at files, so that all ranks do the same.
    with measuring_alone(shape.fingerprint, shape.variant) if first and not random else nullcontext():
        found = broadcast_from_first_rank(scheduler, load_cached(shape) if first else None)
        if found is not None and (found.lookups is not None or not weighed):
            _log_found(found, shown_name(scheduler.model_config.model_path))
            return found
        if first and not random:
            _warn_if_not_kept(shape.fingerprint)
        measured = _measure(scheduler, weighed, shown=first)
        kept = keep_stats(measured, shape.variant) if first and not random else None
        path = broadcast_from_first_rank(scheduler, kept)
    if random and first:
        logger.warning(
            "TriAttention keeps nothing of what it measured, because --load-format dummy means random weights: %s",
            "it measures again after the first update of the weights that flushes the cache"
            if measures_together(scheduler)
            else "start once with the weights, and name the statistics kept then with --triattention-stats",
        )
    if path is not None and first:
        logger.info("TriAttention measured the statistics of this model and keeps them in %s", path)
    return check_stats(dataclasses.replace(measured, source=str(path or MEASURED)), shape)


def measured_stats(scheduler: Scheduler, shape: ModelShape, source: str, weighed: bool) -> QueryStats:
    """Statistics of the model as it is now, measured and kept nowhere; every rank of every stage calls this.

    Args:
        source: what messages call them.
        weighed: whether to fit look-up weights too.

    Raises:
        TriAttentionError: the model cannot be measured.
    """
    measured = _measure(scheduler, weighed, shown=is_first(scheduler))
    return check_stats(dataclasses.replace(measured, source=source), shape)


def _log_found(stats: QueryStats, model: str) -> None:
    if stats.model in (None, model):
        logger.info("TriAttention found the statistics of this model in %s", stats.source)
    else:
        logger.info(
            "TriAttention found the statistics of this model in %s, measured where it was called %s: if that is "
            "another model, remove the file, and the next launch measures",
            stats.source,
            stats.model,
        )


def has_random_weights(scheduler: Scheduler) -> bool:
    """Whether the server was started without weights, which come later, or never."""
    return _settings(scheduler).load_format == "dummy"


def measures_together(scheduler: Scheduler) -> bool:
    """Whether all ranks take an update of the weights in the same step, and can measure then."""
    return not is_staged(scheduler) and not _settings(scheduler).enable_dp_attention


def _settings(scheduler: Scheduler) -> Any:
    """SGLang assembles the fields of the record at run time."""
    return scheduler.server_args


def _warn_if_not_kept(fingerprint: str | None) -> None:
    """Says before the long part, not after it, that the next launch will measure again."""
    why = why_not_kept(fingerprint)
    if why is not None:
        logger.warning(
            "TriAttention will not keep the statistics that it measures now, because %s, so each launch measures "
            "again: make that folder writable, or set XDG_CACHE_HOME to another, or name a file with "
            "--triattention-stats",
            why,
        )


def launch_job(scheduler: Scheduler, weighed: bool = False) -> CalibrationJob:
    """The job measured at launch: the package's own text, and the model's answers to the package's prompts.

    Args:
        weighed: whether to fit look-up weights too, on that text and on records of its words.

    Raises:
        TriAttentionError: there is no tokenizer, hardly any room, or no text for look-ups.
    """
    tokenizer = _tokenizer(scheduler)
    room = room_of(scheduler)
    if room < LEAST_ROOM:
        raise TriAttentionError(
            f"The server has room for {max(room, 0)} tokens of one request, but measuring query statistics at launch "
            f"needs {LEAST_ROOM}: give it a larger KV pool, or name a file with --triattention-stats."
        )
    with resources.as_file(resources.files("sglang_triattn") / TEXT) as path:
        windows = read_windows([str(path)], tokenizer, max_tokens=MAX_TOKENS, window=min(WINDOW, room))
    prompts = trace_prompts(tokenizer, TRACES)
    trace_tokens = min(TRACE_TOKENS, room - max(map(len, prompts)))
    try:
        texts, request = lookup_inputs(tokenizer, windows) if weighed else ((), ())
    except CalibrationError as error:
        raise TriAttentionError(
            "Look-ups cannot be fitted at launch, because the model's tokenizer makes the package's text one of too "
            f"few different words: set --triattention-stats to {AUTO}."
        ) from error
    return CalibrationJob(
        windows=windows,
        prompts=prompts if trace_tokens > 0 else (),
        trace_tokens=trace_tokens,
        lookup_texts=texts,
        lookup_request=request,
    )


def _measure(scheduler: Scheduler, weighed: bool, shown: bool) -> QueryStats:
    job = launch_job(scheduler, weighed)
    tokens = job.tokens + job.lookup_tokens
    if shown:
        logger.info(
            "TriAttention has no statistics of these weights yet and measures them now, once, on %d tokens", tokens
        )
    try:
        seconds = _rehearse(scheduler, job)
        if shown:
            logger.info("TriAttention expects this to take about %d seconds", max(1, round(seconds)))
        with tqdm(total=tokens, unit="token", desc="TriAttention statistics", disable=not shown) as bar:
            return calibrate_scheduler(scheduler, job, lambda done, most: bar.update(done - bar.n))
    except torch.OutOfMemoryError as error:
        raise TriAttentionError(
            "The device ran out of memory while TriAttention measured the statistics of the served model, because the "
            "KV pool leaves too little memory: use a smaller --mem-fraction-static, or give a file made by "
            "`sglang-triattn calibrate` with --triattention-stats PATH."
        ) from error


def _rehearse(scheduler: Scheduler, job: CalibrationJob) -> float:
    """Estimates the seconds that `job` will take, from one short window and a few steps of its traces."""
    probe = CalibrationJob(
        windows=(job.windows[0][:_PROBE_WINDOW],),
        prompts=job.prompts,
        trace_tokens=min(_PROBE_TRACE_TOKENS, job.trace_tokens),
    )
    times = [time.perf_counter()]
    calibrate_scheduler(scheduler, probe, lambda done, most: times.append(time.perf_counter()))
    per_token = (times[1] - times[0]) / len(probe.windows[0])
    # The last passes are decode steps of all traces; the first of them may have compiled something.
    steps = [after - before for before, after in zip(times[-_PROBE_STEPS - 1 :], times[-_PROBE_STEPS:], strict=False)]
    per_step = min(steps) if job.prompts else 0.0
    prefilled = sum(map(len, job.windows)) + sum(map(len, job.prompts)) + job.lookup_tokens
    return per_token * prefilled + per_step * job.trace_tokens


def _tokenizer(scheduler: Scheduler) -> PreTrainedTokenizerBase:
    """The served model's tokenizer, even if SGLang runs without it."""
    tokenizer = getattr(scheduler, "tokenizer", None)
    if tokenizer is not None:
        return tokenizer
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers import get_tokenizer

    # SGLang assembles the fields of these records at run time.
    serving: Any = get_serving()
    model: Any = get_model()
    try:
        return get_tokenizer(
            serving.tokenizer_path,
            tokenizer_mode=serving.tokenizer_mode,
            trust_remote_code=model.trust_remote_code,
            revision=model.revision,
            tokenizer_backend=serving.tokenizer_backend,
        )
    except Exception as error:
        raise TriAttentionError(
            "The statistics of the served model cannot be measured, because it has no tokenizer that loads from "
            f"{serving.tokenizer_path}: give a file made by `sglang-triattn calibrate` with --triattention-stats PATH."
        ) from error
