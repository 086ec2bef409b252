"""A per-user cache of statistics between launches: one file per model, named by its fingerprint and variant.

Neither read nor written where another user decides what is in it: statistics decide what is evicted.
"""

import fcntl
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from sglang_triattn.errors import first_line
from sglang_triattn.files import remove_unfinished, who_else_writes
from sglang_triattn.model.fingerprint import VARIANT_DIGITS, without_weights
from sglang_triattn.stats.file import ModelShape, QueryStats, StatsError, check_stats, load_stats, save_stats

logger = logging.getLogger(__name__)


LOCK_WAIT_S = 600.0
"""How long a launch waits for another one that measures the same model, which may have been paused or hang."""
_LOCK_POLL_S = 0.5


def cache_folder() -> Path | None:
    """$XDG_CACHE_HOME/sglang-triattn/statistics, by default in ~/.cache; it may not exist yet.

    None for a user without a home, such as a container's random user.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            return None
    return Path(base).absolute() / "sglang-triattn" / "statistics"


def cached_path(fingerprint: str, variant: str = "") -> Path | None:
    """Path of a model's cached statistics; None without a cache folder.

    Args:
        variant: `model_variant` of the model.
    """
    folder = cache_folder()
    return None if folder is None else folder / f"{'-'.join(filter(None, (fingerprint, variant)))}.safetensors"


def kept_path(fingerprint: str, variant: str = "") -> Path | None:
    """Path of the cached statistics that a launch of this model reads; None if there is no such file.

    A quantised copy does not show which weights it was made from, so it reads what was kept of any.

    Raises:
        OSError: the folder cannot be looked into.
    """
    path = cached_path(fingerprint, variant)
    if path is None or path.is_file():
        return path
    if variant == without_weights(variant):
        others = path.parent.glob(f"{path.stem}-w{'[0-9a-f]' * VARIANT_DIGITS}.safetensors")
        return max(others, key=lambda other: other.stat().st_mtime, default=None)
    return None


def load_cached(shape: ModelShape) -> QueryStats | None:
    """Cached statistics of a served model, checked against it; None if there are none that fit.

    A file that is damaged, belongs to another model or leaves dims unscored is logged and ignored, because the model
    can be measured again.
    """
    if shape.fingerprint is None:
        return None
    folder = cache_folder()
    try:
        path = kept_path(shape.fingerprint, shape.variant)
        if path is None or not _is_ours(path):
            return None
        stats = check_stats(load_stats(path), shape)
        if stats.scored_dims == shape.head_dim:
            return stats
        logger.info("TriAttention passes over %s, which is without the dims that this model does not rotate", path)
    except OSError as error:
        logger.warning("TriAttention cannot look into %s (%s)", folder, error.strerror)
    except StatsError as error:
        logger.warning("TriAttention passes over a kept statistics file: %s", error)
    return None


def _is_ours(path: Path) -> bool:
    """Whether this user alone decides what is in a file of the cache, which may not exist; logs who else does.

    Raises:
        OSError: the file or a folder cannot be looked at.
    """
    for place in (path.parent.parent, path.parent, path):
        who = who_else_writes(place)
        if who is not None:
            logger.warning(
                "TriAttention does not use its cache, because %s %s: make it this user's own, or name a file with "
                "--triattention-stats",
                place,
                who,
            )
            return False
    return True


def keep_stats(stats: QueryStats, variant: str = "") -> Path | None:
    """Caches the statistics of a model for its next launch; returns the file, or None if that is not possible.

    Args:
        variant: `model_variant` of the model.

    A folder that is full, read-only or another user's, or a model without a fingerprint, only means that the next
    launch measures again.
    """
    if stats.fingerprint is None:
        logger.warning("TriAttention keeps no statistics of this model, because it has no config.json to know it by")
        return None
    path = cached_path(stats.fingerprint, variant)
    if path is None:
        return None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not _is_ours(path):
            return None
        remove_unfinished(path)
        save_stats(stats, path)
    except OSError as error:
        logger.warning("TriAttention cannot create %s (%s); the next launch will measure again", path.parent, error)
    except StatsError as error:
        logger.warning("TriAttention keeps no statistics, the next launch will measure again: %s", error)
    else:
        return path
    return None


def why_not_kept(fingerprint: str | None) -> str | None:
    """Why statistics of a model that is about to be measured will not be kept, in words; None if they will.

    Creates the folder if it does not exist.
    """
    if fingerprint is None:
        return "this model has no config.json to know it by"
    path = cached_path(fingerprint)
    if path is None:
        return "this user has no home folder"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
        return None if _is_ours(path) else f"{path.parent} is not this user's alone"
    except OSError as error:
        return f"{path.parent} cannot be written ({first_line(error)})"


@contextmanager
def measuring_alone(fingerprint: str | None, variant: str = "") -> Iterator[None]:
    """Lock held while a model is looked up, measured and cached, so that servers that start together measure it once.

    Without a folder for the lock, or once it has waited for LOCK_WAIT_S, each server measures for itself.
    """
    path = None if fingerprint is None else cached_path(fingerprint, variant)
    if path is None:
        yield
        return
    path = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # In another user's folder the lock may be a link to any file of this user's, or be held for ever.
        file = path.open("a") if _is_ours(path) else None
    except OSError:
        file = None
    if file is None:
        yield
        return
    with file:
        if not _locked(file):
            logger.info(
                "TriAttention waits up to %.0f s for another server that measures the same model (lock %s)",
                LOCK_WAIT_S,
                path,
            )
            _wait_for_lock(file, path)
        yield


def _locked(file: IO) -> bool:
    """Whether this process now holds the lock, or the file system has none."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def _wait_for_lock(file: IO, path: Path) -> None:
    deadline = time.monotonic() + LOCK_WAIT_S
    while not _locked(file):
        if time.monotonic() > deadline:
            logger.warning(
                "TriAttention waited %.0f s for the server that holds %s, which may be paused, and now measures by "
                "itself: end that server if it hangs",
                LOCK_WAIT_S,
                path,
            )
            return
        time.sleep(_LOCK_POLL_S)
