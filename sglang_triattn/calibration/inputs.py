"""Turns user input into a CalibrationJob, the same way for both engines."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import transformers

from sglang_triattn.calibration.job import (
    DEFAULT_MAX_TOKENS,
    DEFAULT_TRACE_TOKENS,
    DEFAULT_WINDOW,
    CalibrationError,
    CalibrationJob,
    check_count,
    check_lengths,
    check_texts,
)
from sglang_triattn.calibration.lookups import lookup_inputs
from sglang_triattn.calibration.prompts import trace_prompts
from sglang_triattn.calibration.resume import load_progress
from sglang_triattn.calibration.texts import read_windows
from sglang_triattn.errors import first_line
from sglang_triattn.model.fingerprint import model_fingerprint


@dataclass(frozen=True)
class Texts:
    """The texts to calibrate on.

    Attributes:
        data: files: .jsonl has one chat per line, anything else is one plain text.
        traces: number of texts that the model generates itself.
        trace_tokens: most tokens of each generated text.
        max_tokens: tokens used from the files, from the start of the first.
        window: tokens per forward pass over the files.
        lookups: whether to fit look-up weights too.
    """

    data: Sequence[str] = ()
    traces: int = 0
    trace_tokens: int = DEFAULT_TRACE_TOKENS
    max_tokens: int = DEFAULT_MAX_TOKENS
    window: int = DEFAULT_WINDOW
    lookups: bool = False


def prepare_job(model_path: str, texts: Texts, *, identity: str = "", partial: Path | None = None) -> CalibrationJob:
    """Tokenizes `texts` for a model.

    Args:
        model_path: model folder or hub name for transformers.
        identity: what else the result depends on, after the model and the texts.
        partial: file for the calibration's progress; if an earlier run left one, a line on stderr says so.

    Raises:
        CalibrationError: the model or a text cannot be used.
    """
    check_lengths(texts.max_tokens, texts.window)
    check_texts(texts.data, texts.traces, texts.trace_tokens)
    limit = _position_limit(model_path)
    tokenizer = loaded(transformers.AutoTokenizer, model_path)
    windows = read_windows(
        texts.data, tokenizer, max_tokens=texts.max_tokens, window=min(texts.window, limit or texts.window)
    )
    lookup_texts, lookup_request = lookup_inputs(tokenizer, windows) if texts.lookups else ((), ())
    job = CalibrationJob(
        windows=windows,
        prompts=trace_prompts(tokenizer, texts.traces),
        trace_tokens=texts.trace_tokens,
        identity=f"{model_path} {model_fingerprint(model_path)} {identity}",
        lookup_texts=lookup_texts,
        lookup_request=lookup_request,
        partial=None if partial is None else str(partial.absolute()),
    )
    check_count(job.tokens)
    done = load_progress(job).done
    if done:
        print(f"going on after {done} of {job.units} texts", file=sys.stderr)
    return job


def loaded(kind, model_path: str, **options):
    """Calls `kind.from_pretrained`. Raises CalibrationError with one sentence if it fails."""
    try:
        return kind.from_pretrained(model_path, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = first_line(error)
        raise CalibrationError(
            f"Model {model_path} cannot be loaded: transformers says {reason!r}; give a model folder or a "
            "Hugging Face name."
        ) from error


def _position_limit(model_path: str) -> int | None:
    config = loaded(transformers.AutoConfig, model_path).get_text_config()
    return getattr(config, "max_position_embeddings", None)
