"""The folder of kept statistics, and what is there for one model."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sglang_triattn.doctor.rows import NOTE, OK, WRONG, Row
from sglang_triattn.errors import first_line

_AGAIN = "each launch with --triattention-stats auto measures again"


def cache_rows() -> Iterator[Row]:
    """The folder that `--triattention-stats auto` reads and writes."""
    from sglang_triattn.stats.cache import cache_folder

    folder = cache_folder()
    if folder is None:
        yield Row("folder", WRONG, "this user has no home folder and XDG_CACHE_HOME is not set", _AGAIN)
        return
    if not folder.exists():
        above = next(parent for parent in folder.parents if parent.exists())
        if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
            yield Row("folder", NOTE, f"{folder} does not exist yet; the first launch creates it")
        else:
            yield Row("folder", WRONG, f"{folder} does not exist, and {above} cannot be written", _AGAIN)
        return
    try:
        files = [path.stat().st_size for path in folder.glob("*.safetensors")]
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        yield Row("folder", WRONG, f"{folder} cannot be written ({first_line(error)})", _AGAIN)
    else:
        size = f"{sum(files):,} bytes"
        yield Row("folder", OK, f"{folder}: {len(files)} file{'s' * (len(files) != 1)}, {size}")


def model_rows(model: str) -> Iterator[Row]:
    """Whether a model is compressed, as `sglang-triattn check` says, and the statistics that are kept for it.

    Args:
        model: its folder or config.json, or a hub name whose files are in the local Hugging Face cache.

    Raises:
        TriAttentionError: it has no readable config.json.
    """
    from sglang_triattn.compatibility.verdict import attention_words, judge
    from sglang_triattn.config import Config
    from sglang_triattn.model.fingerprint import model_fingerprint, model_variant, with_look_ups
    from sglang_triattn.model.sizes import found_path, load_config
    from sglang_triattn.stats.cache import kept_path

    folder = found_path(model)
    verdict = judge(load_config(model), model, Config(), {})
    if verdict.refusal is not None or verdict.layout is None:
        yield Row("check", WRONG, verdict.refusal or "", "this model is not compressed with the default flags")
    else:
        yield Row("check", OK, f"{verdict.name} is compressed: {attention_words(verdict.layout)}")
    place = str(folder.parent if folder and folder.is_file() else folder or model)
    fingerprint = model_fingerprint(place)
    if fingerprint is None:
        yield Row("statistics", NOTE, "no fingerprint can be computed, so none are kept")
    else:
        variant = model_variant(place)
        yield _statistics_row(kept_path(fingerprint, variant))
        weighed = kept_path(fingerprint, with_look_ups(variant))
        if weighed is not None and weighed.is_file():
            yield _statistics_row(weighed)


def _statistics_row(path: Path | None) -> Row:
    from sglang_triattn.stats.concentration import SPREAD, concentration, outlook
    from sglang_triattn.stats.file import StatsError, load_stats

    if path is None or not path.is_file():
        return Row("statistics", NOTE, "none of this model are kept yet; the first launch measures and keeps them")
    try:
        stats = load_stats(path)
    except StatsError as error:
        return Row("statistics", WRONG, str(error), _AGAIN)
    mean = concentration(stats).mean().item()
    measured = f", measured on {stats.token_count:,} tokens" if stats.token_count else ""
    return Row("statistics", OK if mean >= SPREAD else NOTE, f"{path.name}{measured}; {outlook(stats)}")
