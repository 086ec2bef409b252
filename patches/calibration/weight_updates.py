"""What follows from new weights: rows of the old ones go, and statistics are measured again where that is wanted.

SGLang part: `SchedulerWeightUpdaterManager` (sglang/srt/managers/scheduler_components/weight_updater.py).

An update may come in hundreds of parts, each of which is recorded. The last one flushes the cache (`flush_cache`, which
is SGLang's default), and that succeeds only if no request runs or waits: then there is room to measure, on all ranks at
once, because all of them take the same requests in the same step. A server that has given back its KV pool meanwhile
(release_memory_occupation) measures once it has it again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from sglang_triattn.config import Config
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.rounds.plan import Totals

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

logger = logging.getLogger(__name__)

AFTER_UPDATE = "measured after an update of the weights"


class WeightUpdates:
    """
    Args:
        read: returns the settings and totals of the compressor, or None if there is none.
        is_wanted: whether statistics are to be measured again after the next update.
        measure: does that, on every rank; raises TriAttentionError if it cannot.
        drop_rows: gives back the rows of idle conversations.
    """

    def __init__(
        self,
        read: Callable[[], tuple[Config, Totals] | None],
        is_wanted: Callable[[], bool],
        measure: Callable[[], None],
        drop_rows: Callable[[], None],
    ) -> None:
        self._read, self._is_wanted, self._measure, self._drop_rows = read, is_wanted, measure, drop_rows
        self._warned_after: int | None = None
        self._pending = False

    def hooks(self) -> list[Hook]:
        target = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
        return [
            # Every way to update weights comes here once it has succeeded, and then flushes.
            Hook(
                f"{target}.record_weight_version_after_update",
                "after",
                self._on_update,
                "self weight_version",
                why="gives back rows of the old weights, and warns of their statistics",
            ),
            Hook(
                f"{target}.flush_cache_after_weight_update",
                "after",
                self._on_flush,
                "self recv_req success message",
                why="measures the new weights after the last part of an update, if asked to",
            ),
            Hook(
                f"{target}.resume_memory_occupation",
                "after",
                self._on_resume,
                "self recv_req",
                why="measures the new weights once the KV pool is there again",
            ),
        ]

    def _on_update(self, *_: object, **__: object) -> None:
        found = self._read()
        if found is None:
            return
        self._drop_rows()
        config, totals = found
        if self._is_wanted():
            self._pending = True
        elif totals.rounds != self._warned_after:
            self._warned_after = totals.rounds
            logger.warning(
                "The weights were updated, but TriAttention goes on scoring with statistics of the weights before, "
                "from %s: start the server with --triattention-stats-after-update measure if the queries change much",
                config.stats,
            )

    def _on_flush(
        self,
        result: tuple[bool, str],
        manager: SchedulerWeightUpdaterManager,
        recv_req: UpdateWeightFromDiskReqInput,
        *_: object,
        **__: object,
    ) -> tuple[bool, str]:
        if result[0] and recv_req.flush_cache:
            self._measure_if_possible(manager)
        return result

    def _on_resume(self, result: object, manager: SchedulerWeightUpdaterManager, *_: object, **__: object) -> object:
        self._measure_if_possible(manager)
        return result

    def _measure_if_possible(self, manager: SchedulerWeightUpdaterManager) -> None:
        if not self._pending or manager.offload_tags or not manager.is_fully_idle():
            return
        self._pending = False
        try:
            self._measure()
        except TriAttentionError as error:
            logger.error("TriAttention goes on with the statistics of the weights before: %s", error)
