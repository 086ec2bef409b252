"""The server's compaction for `transformers` models: a `Cache` whose rows are compacted as requests are, see `cache`.

Public names are imported here.
"""

from sglang_triattn.transformers_cache.cache import CompactedCache
from sglang_triattn.transformers_cache.feed import compute_dense, feed, forward, replay
from sglang_triattn.transformers_cache.greedy import generate
from sglang_triattn.transformers_cache.policy import CacheError, Policy, Pools, Setting

__all__ = [
    "CacheError",
    "CompactedCache",
    "Policy",
    "Pools",
    "Setting",
    "compute_dense",
    "feed",
    "forward",
    "generate",
    "replay",
]
