"""The row of a request: what a round reads and writes of it, and how it passes from one holder to another.

SGLang parts: `Req`, `ReqKvInfo` (sglang/srt/managers/schedule_batch.py), `UnifiedRadixCache.free_kv_row`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_triattn.patches.request.chunked_prefill import hide_evicted_ids
from sglang_triattn.patches.request.compressed import compression_of, frozen_of, write_tree_rule
from sglang_triattn.request.lifecycle import CompressedRequest
from sglang_triattn.request.row_record import FirstEvicted
from sglang_triattn.rounds.inputs import TurnInputs
from sglang_triattn.rounds.plan import Plan, ceil_align, due_length
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ReqKvInfo
    from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
    from sglang.srt.mem_cache.unified_cache.unified_tree_core_interface import NodeId


@dataclass(frozen=True, slots=True, eq=False)
class CompressedRow:
    """The row of a request that may have a round; made once for a round, see `compactable_row`.

    Attributes:
        request: SGLang's request, which holds the row.
        compression: its life and record.
        settings: its settings.
        page_size: slots per page of the pool.
    """

    request: Req
    compression: CompressedRequest
    settings: RoundRules
    page_size: int

    @property
    def kv(self) -> ReqKvInfo:
        """SGLang's record of the row."""
        return self.request.kv

    @property
    def frozen(self) -> int:
        """First position that a round may touch; the tree moves it on when it takes more of the row."""
        return frozen_of(self.request, self.settings, self.page_size, self.compression)

    @property
    def evicted(self) -> int:
        """Tokens evicted from the row."""
        return self.compression.evicted_tokens

    def recent(self, plan: Plan) -> int:
        """Recency window of a round: `recent`, or fewer if too few tokens came since a round permuted the row.

        That happens only at page sizes above 1, in early rounds, and in turns with other settings. It is more where
        input tokens of resumed turns are among the newest and must stay in their places.
        """
        appended = self.kv.kv_committed_len - self.compression.held_record.unordered_before(plan)
        return max(min(self.settings.recent, appended), plan.newest)

    @property
    def inputs(self) -> TurnInputs:
        """Input tokens of resumed turns in the row."""
        return self.compression.held_record.inputs

    def lengths(self) -> dict[str, Any]:
        """Arguments of `sglang_triattn.rounds.plan.plan_round`, as they are now."""
        return {
            "frozen": self.frozen,
            "length": self.kv.kv_committed_len,
            "evicted_before": self.evicted,
            "page_size": self.page_size,
            "inputs": self.inputs,
        }

    def wait_until_due(self) -> None:
        """Notes when the request, which has no due round, may have its next one."""
        due = due_length(
            self.settings,
            frozen=self.frozen,
            page_size=self.page_size,
            evicted_before=self.evicted,
            inputs=self.inputs,
        )
        self.compression.wait_until(due, self.kv.cache_protected_len)

    def record(self, plan: Plan, first_evicted: FirstEvicted, unordered_len: int, tail: int) -> None:
        """Records a round that is complete, after which the tree never takes the whole row."""
        self.compression.round(plan, first_evicted, unordered_len, tail)
        write_tree_rule(self.request)


def compactable_row(request: Req, page_size: int, *, in_prefill: bool = False) -> CompressedRow | None:
    """The row of a request that may be compressed, continues, and holds its row alone; None for any other.

    Args:
        in_prefill: whether it is between two chunks of its prefill. A request that was aborted in the step in which
            SGLang retracted it prefills all that it had, before SGLang ends it.
    """
    compression = compression_of(request)
    settings = compression.settings
    if (
        settings is None
        or not request.kv.holds_kv
        or request.finished()
        or (request.to_finish is not None and not in_prefill)
        or request.is_retracted
        or (request.kv.kv_committed_len != request.kv.kv_allocated_len and not compression.reserve)
    ):
        return None
    return CompressedRow(request, compression, settings, page_size)


def write_row_length(request: Req, length: int, allocated: int | None = None) -> None:
    """Sets the row's length to `length` computed entries; with a reserve, `allocated` counts that too."""
    request.kv.kv_committed_len = length
    request.kv.kv_allocated_len = length if allocated is None else allocated


def take_row(request: Req, kv: ReqKvInfo, last_node: NodeId) -> None:
    """Makes a waiting request continue a row that rounds have compacted; its prompt is not looked up anywhere else.

    Args:
        kv: SGLang's record of the row.
        last_node: node of the tree where its frozen part ends.
    """
    request.kv = kv
    hide_evicted_ids(request)
    request.prefix_len = kv.kv_allocated_len
    request.last_node = request.best_match_node = request.last_host_node = last_node
    request.host_hit_length = request.swa_host_hit_length = request.mamba_host_hit_length = 0
    request.mamba_branching_seqlen = None


def leave_row(request: Req) -> None:
    """Undoes `take_row`: the waiting request has no row again."""
    request.detach_kv()
    request.prefix_len, request.last_node = 0, None


def count_as_cached(request: Req, tokens: int) -> None:
    """Counts evicted tokens of a resumed row as cached: they were not computed again either."""
    request.cached_tokens += tokens


def free_tail(kv: ReqKvInfo, length: int, tree_cache: BasePrefixCache) -> None:
    """Frees the pages of a row that lie entirely after its first `length` entries."""
    first_empty = ceil_align(length, tree_cache.page_size)
    if first_empty < kv.kv_allocated_len:
        tree_cache.free_kv_row(kv, [(first_empty, kv.kv_allocated_len)])
