"""Which failures the server survives, and when compression stops.

Three failures are raised again and end the server: a fault of the device, after which no call to it works; a failure
with tensor or pipeline parallelism, where the other ranks have gone on; and counts of slots that do not add up.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from sglang_triattn.census import IntegrityError
from sglang_triattn.errors import type_and_line
from sglang_triattn.patches.ranks.pipeline import is_staged

if TYPE_CHECKING:
    from sglang_triattn.patches.sglang_types import Scheduler

logger = logging.getLogger(__name__)

LIMIT = 3
"""Steps in a row whose rounds fail, after which compression stops."""


class Breaker:
    """Counts failures, and stops compression after LIMIT of them in a row.

    Args:
        on_stop: called once, when compression stops.

    Attributes:
        reason: why compression has stopped, one sentence; None while it has not.
    """

    def __init__(self, on_stop: Callable[[], None] = lambda: None) -> None:
        self.reason: str | None = None
        self._on_stop = on_stop
        self._row: list[Exception] = []

    def succeeded(self) -> None:
        """Called after a step whose rounds are complete."""
        self._row.clear()

    def failed(self, error: Exception, what: str) -> None:
        """Counts a step whose rounds failed.

        Args:
            what: what failed and what became of it, for the log.
        """
        if self.reason is not None:
            logger.debug("TriAttention: %s", what, exc_info=error)
            return
        self._row.append(error)
        logger.warning("TriAttention: %s (%s)", what, type_and_line(error))
        if len(self._row) < LIMIT:
            return
        first = self._row[0]
        self._row.clear()
        self.reason = (
            f"Compression has stopped, because its rounds failed {LIMIT} times in a row ({type_and_line(first)}): "
            "requests are answered without it, so restart the server."
        )
        logger.error("TriAttention: %s", self.reason, exc_info=first)
        self._on_stop()


def check_survivable(scheduler: Scheduler, error: Exception) -> None:
    """Raises if the server cannot go on after `error`; waits for the device."""
    if isinstance(error, IntegrityError):
        raise error
    if scheduler.tp_group.world_size > 1 or is_staged(scheduler):
        logger.error("TriAttention: a failure on one of several ranks ends the server, because the others have gone on")
        raise error
    if scheduler.req_to_token_pool.req_to_token.is_cuda:
        # Raises after a fault of the device, as every call to it would.
        torch.cuda.synchronize()
