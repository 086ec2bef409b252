"""Device memory for scoring, allocated before SGLang measures what is left for the KV pool.

SGLang part: `KVCacheConfigurator` (sglang/srt/mem_cache/kv_cache_configurator.py). It sizes the pool by the memory that
is free once the weights are loaded, and part of it again after its CUDA graphs are captured. Memory allocated earlier
is charged to the pool's share both times.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.scorer import WorkspacePlan
from sglang_triattn.patches.hooks.hook import Hook
from sglang_triattn.patches.model.layers import attention_layers, numbers_of, scored_layers
from sglang_triattn.rounds.plan import most_kept, scored_tokens
from sglang_triattn.rounds.rules import RoundRules

if TYPE_CHECKING:
    from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator

logger = logging.getLogger(__name__)


class Workspace:
    """Memory for the scorer of this process; none if it runs without kernels.

    Attributes:
        plan: sizes of its parts; None until SGLang sizes its pool, and always on CPUs.
        memory: [plan.bytes() / 4] float32; None likewise.
    """

    def __init__(self, config: RoundRules) -> None:
        self._config = config
        self.plan: WorkspacePlan | None = None
        self.memory: torch.Tensor | None = None

    def hooks(self) -> list[Hook]:
        target = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._profile_available_bytes"
        return [
            Hook(
                target,
                "before",
                self._reserve,
                "self pre_model_load_memory",
                why="allocates memory for scoring before the KV pool is sized",
            )
        ]

    def _reserve(self, configurator: KVCacheConfigurator, *_: object, **__: object) -> None:
        if configurator.device == "cpu" or self.memory is not None:
            return
        try:
            self.plan = plan_workspace(configurator, self._config)
        except TriAttentionError:
            # The model cannot be compressed; checks after the scheduler is built say why.
            return
        self.memory = torch.empty(self.plan.bytes() // 4, dtype=torch.float32, device=configurator.device)
        logger.info("TriAttention holds %d MiB of device memory for scoring", self.plan.bytes() >> 20)


def plan_workspace(configurator: KVCacheConfigurator, config: RoundRules) -> WorkspacePlan:
    """Plans the memory that scoring needs for the model of a KVCacheConfigurator.

    Raises:
        TriAttentionError: its attention layers are of a kind that cannot be scored.
    """
    layers = scored_layers(attention_layers(configurator.model))
    q_heads, kv_heads = layers[0].heads
    num_tokens, longest = scored_tokens(config, configurator.model_config.context_len)
    return WorkspacePlan(
        layers=len(numbers_of(layers)),
        q_heads=q_heads,
        kv_heads=kv_heads,
        num_tokens=num_tokens,
        longest=longest,
        selection=config.selection,
        value_share=config.value_share,
        most_kept=most_kept(config, configurator.model_config.context_len),
    )
