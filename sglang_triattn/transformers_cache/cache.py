"""The server's compaction for `transformers` models: a `Cache` whose rows are compacted as requests are.

    from sglang_triattn.transformers_cache import feed, forward

    cache = CompactedCache.for_model(model, settings, stats, prompt_length=50, capacity=4096)
    logits = feed(model, cache, ids)              # compaction rounds run where the server would run them
    answers = cache.branch(room=64)               # the same state, for questions
    forward(model, answers, question)             # no rounds

Row b of the batch is compacted under settings[b], so one pass of the model compares all settings. Plan, scorer,
selection and moves are the server's own code. `replay` is faster: its rounds run on K/V computed once, densely, for all
settings; its docstring says what differs.

Any model works whose layers all have full attention with RoPE, computed by "eager" or "sdpa". A row has no page table,
so no memory is saved: this is for measuring what compaction does to answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from sglang_triattn.compatibility.traits import uncovered_in_file
from sglang_triattn.compatibility.uncovered import why_uncovered
from sglang_triattn.config import Config
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.model.layers import scored_layers
from sglang_triattn.model.rope import rope_of_transformers
from sglang_triattn.rounds.rules import complete
from sglang_triattn.rounds.scoring import build_scorer
from sglang_triattn.stats.file import ModelShape, QueryStats, check_stats
from sglang_triattn.transformers_cache.policy import CacheError, Policy, Pools, Setting
from sglang_triattn.transformers_cache.rows import KVRows

_ATTENTION = ("eager", "sdpa")


class CompactedCache(Cache):
    """K/V of several rows of the same tokens, each compacted under its own setting; see `for_model`.

    Each call of the model needs what `inputs` returns; `feed` and `forward` take care of that.

    Attributes:
        rows: the rows: lengths, rounds, reports, and `positions_of`, the positions that each head holds.
    """

    def __init__(self, rows: KVRows) -> None:
        super().__init__(layers=[_Layer(self, number) for number in range(len(rows.pools.k_buffers))])
        self.rows = rows
        self._pending: tuple[torch.Tensor, list[int]] | None = None

    @classmethod
    def for_model(
        cls,
        model: Any,
        settings: Sequence[Setting | Config],
        stats: QueryStats | None = None,
        *,
        capacity: int,
        prompt_length: int,
        protected: int = 0,
        page_size: int = 1,
    ) -> CompactedCache:
        """An empty cache on the model's device and in its dtype.

        Args:
            model: a transformers model for causal language modelling.
            settings: one per row; a Config stands for Setting(config).
            stats: the model's query statistics; needed by settings that name no policy.
            capacity: KV entries that a row can hold; a decoding request needs at most `max_kv_tokens`.
            prompt_length, protected, page_size: see `KVRows`.

        Raises:
            CacheError or another TriAttentionError: the model, the statistics or a number cannot work.
        """
        settings = [one if isinstance(one, Setting) else Setting(one) for one in settings]
        if not settings:
            raise CacheError("settings is empty, but each row of the batch needs one.")
        shape = shape_of(model)
        if stats is not None:
            stats = check_stats(stats, shape)

        def make_scorer(config: Config, pools: Pools) -> Policy:
            if stats is None:
                raise CacheError("A setting names no policy, and its scorer needs stats: give the model's statistics.")
            context = len(pools.k_buffers[0]) // len(settings)
            rules = complete(config, weighed=stats.lookups is not None)
            return build_scorer(rules, stats, pools.k_buffers, pools.v_buffers, context=context)

        pools = Pools.empty(
            len(settings) * max(capacity, 0),
            shape.num_layers, shape.num_kv_heads, shape.head_dim, model.dtype, model.device,
        )  # fmt: skip
        rows = KVRows(
            settings, pools, capacity, make_scorer,
            prompt_length=prompt_length, protected=protected, page_size=page_size,
        )  # fmt: skip
        # Refuse what cannot work now, not at the first round.
        for row in range(len(settings)):
            rows.policy_of(row)
        return cls(rows)

    def inputs(self, size: int, counts: Sequence[int] | None = None) -> dict[str, Any]:
        """Keyword arguments for one call of the model with `size` tokens per row, without `input_ids` [B, size].

        Args:
            counts: how many of each row's tokens count, from the first; the others are padding and are forgotten.

        Returns:
            attention_mask [1 or B, 1, size, longest row] in the cache's dtype, to be added; position_ids [B, size],
            logical; past_key_values and use_cache.

        Raises:
            CacheError: a row has no room, or `counts` does not fit.
        """
        rows = self.rows
        counts = [size] * len(rows.lengths) if counts is None else list(counts)
        if len(counts) != len(rows.lengths) or not all(0 <= count <= size for count in counts):
            raise CacheError(f"counts is {counts}, but it must hold {len(rows.lengths)} numbers from 0 to {size}.")
        self._pending = (rows.slots(size), counts)
        k = rows.pools.k_buffers[0]
        steps = torch.arange(size, device=k.device)
        logical = [rows.logical_length(row) for row in range(len(rows.lengths))]
        # One mask serves rows of equal lengths.
        lengths = rows.lengths if len(set(rows.lengths)) > 1 else rows.lengths[:1]
        last = torch.tensor(lengths, device=k.device)[:, None] + steps
        seen = torch.arange(max(lengths) + size, device=k.device) <= last[..., None]
        mask = torch.zeros(seen.shape, dtype=k.dtype, device=k.device).masked_fill_(~seen, torch.finfo(k.dtype).min)
        return {
            "attention_mask": mask[:, None],
            "position_ids": torch.tensor(logical, device=k.device)[:, None] + steps,
            "past_key_values": self,
            "use_cache": True,
        }

    def branch(self, rows: Sequence[int] | None = None, *, room: int | None = None) -> CompactedCache:
        """A copy that shares nothing with this cache, to be fed with other tokens.

        Args:
            rows: the rows to copy, in this order, possibly repeated; all by default.
            room: free KV entries of the longest copied row; by default the copy has this cache's capacity.

        Raises:
            CacheError: a row does not exist.
        """
        source = self.rows
        chosen = list(range(len(source.lengths))) if rows is None else list(rows)
        longest = max((source.lengths[row] for row in chosen if 0 <= row < len(source.lengths)), default=0)
        return CompactedCache(source.branch(chosen, source.capacity if room is None else max(longest + room, 1)))

    def _store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends K and V [B, H_kv, size, head_dim] of one layer; returns all of them, [B, H_kv, longest, head_dim]."""
        rows, expected = self.rows, self._pending
        if expected is None or keys.shape[0] != len(rows.lengths) or keys.shape[2] != expected[0].shape[1]:
            raise CacheError(
                f"The model was called with {keys.shape[0]} rows of {keys.shape[2]} tokens that `inputs` was not asked "
                "about: use `feed` or `forward`, or give each call of the model what `inputs` returns."
            )
        slots, counts = expected
        longest = max(rows.lengths) + slots.shape[1]
        rows.write(layer, slots, keys, values)
        if layer == len(self.layers) - 1:
            rows.advance(slots, counts)
            self._pending = None
        pools = (rows.pools.k_buffers[layer], rows.pools.v_buffers[layer])
        k, v = (pool.unflatten(0, (len(counts), -1))[:, :longest].transpose(1, 2) for pool in pools)
        return k, v


class _Layer(CacheLayerMixin):
    """One layer of a CompactedCache, with the interface that transformers expects."""

    def __init__(self, cache: CompactedCache, number: int) -> None:
        super().__init__()
        self._cache, self._number = cache, number

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Does nothing: the pools exist from the start."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> tuple:
        return self._cache._store(self._number, key_states, value_states)

    def get_seq_length(self) -> int:
        """KV entries of the longest row, which is not the position of the next token."""
        return max(self._cache.rows.lengths)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return self._cache.rows.capacity

    def reset(self) -> None:
        raise CacheError("A CompactedCache cannot be reset: build another, or branch it before it is fed.")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        raise CacheError("A CompactedCache cannot be reordered in place: branch it with the rows wanted.")


def shape_of(model: Any) -> ModelShape:
    """The shape of a loaded transformers model, to check statistics against.

    Raises:
        TriAttentionError: its attention cannot be compacted, or is computed in another way than "eager" or "sdpa".
    """
    config = model.config.get_text_config()
    uncovered = uncovered_in_file({**config.to_dict(), "architectures": [type(model).__name__]})
    # Not SGLang but transformers computes it, and how its layers rotate is tried on the model itself.
    uncovered.pop("unknown", None)
    reason = why_uncovered(uncovered)
    if reason is None and getattr(config, "kv_lora_rank", None):
        reason = "it caches latents in place of keys (MLA)"
    if reason is not None:
        raise CacheError(f"The model cannot be compacted, because {reason}: use one with full attention and RoPE.")
    if config._attn_implementation not in _ATTENTION:
        raise CacheError(
            f"The model computes attention by {config._attn_implementation!r}, which takes no mask for each row: load "
            f"it with attn_implementation={_ATTENTION[0]!r} or {_ATTENTION[1]!r}."
        )
    layers, rotates = scored_layers(config)
    if len(layers) < config.num_hidden_layers:
        raise CacheError(
            f"The model cannot be compacted, because only {len(layers)} of its {config.num_hidden_layers} layers have "
            "full attention: use one that has it in all."
        )
    heads = config.num_attention_heads
    return ModelShape(
        layers=layers,
        num_q_heads=heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope=rope_of_transformers(model.base_model, config),
        fingerprint=model_fingerprint(config._name_or_path) if config._name_or_path else None,
        rotates=rotates,
    )
