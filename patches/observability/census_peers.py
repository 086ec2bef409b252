"""The window layers' own KV pool as the census sees it.

SGLang part: `SWATokenToKVPoolAllocator` (sglang/srt/mem_cache/allocator/swa.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sglang_triattn.census_windows import Peers
from sglang_triattn.patches.request.window_pool import cursor_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ReqKvInfo
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    from sglang_triattn.patches.sglang_types import Scheduler


def read_peers(scheduler: Scheduler, records: Sequence[ReqKvInfo]) -> Peers:
    """Reads the pool of a scheduler that has one.

    Args:
        records: SGLang's records of all rows that are held, in the order of the census.
    """
    allocator = cast("SWATokenToKVPoolAllocator", scheduler.token_to_kv_pool_allocator)
    own, tree, page_size = allocator.swa_attn_allocator, scheduler.tree_cache, allocator.page_size
    return Peers(
        pages=own.size // page_size,
        free=to_host(cast(torch.Tensor, own.get_all_free_pages())),
        # The last one stands for "no slot".
        of=to_host(allocator.full_to_swa_index_mapping[:-1]),
        tree=tree.swa_evictable_size() + tree.swa_protected_size(),
        cursor=np.array([cursor_of(kv, page_size) for kv in records], np.int64),
        reach=cast(int, tree.swa_retain_window),
        computed=np.array([kv.kv_committed_len for kv in records], np.int64),
    )


def to_host(slots: torch.Tensor) -> np.ndarray:
    """`slots` on the host as int64; not copied if they already are."""
    return slots.cpu().numpy().astype(np.int64, copy=False)
