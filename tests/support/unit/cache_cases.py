"""Shared by the tests of the cache for transformers: settings, a policy, and how a cache is built."""

import torch

from sglang_triattn.config import Config
from sglang_triattn.transformers_cache.cache import CompactedCache

CONFIG = Config(budget=64, interval=32, recent=16)
UNLIMITED = Config(budget=10_000)
PROMPT, TOKENS = 50, 300


class Newest:
    """Keeps what a sliding window would keep."""

    def keep(self, slots, lengths, next_positions, keep, recent):
        return (lengths[:, None] - keep + torch.arange(keep))[:, None].expand(-1, 2, -1)


def make_cache(model, settings, stats=None, **changes):
    return CompactedCache.for_model(model, settings, stats, **{"capacity": TOKENS, "prompt_length": PROMPT, **changes})
