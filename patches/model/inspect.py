"""The loaded model's shape, rotary embedding and KV pool, as the scorer needs them.

SGLang parts: `RotaryEmbedding` (sglang/srt/layers/rotary_embedding), `MHATokenToKVPool` and `MLATokenToKVPool`
(mem_cache/memory_pool.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from sglang_triattn.kernels.pools import KINDS
from sglang_triattn.model.fingerprint import model_fingerprint, model_variant
from sglang_triattn.model.rope import Rope, ropes_of_buffers, same_rope
from sglang_triattn.patches.model.layers import (
    UnsupportedModel,
    attention_layers,
    is_rotary,
    numbers_of,
    scored_layers,
)
from sglang_triattn.patches.model.rotation import Rotation
from sglang_triattn.stats.file import ModelShape

if TYPE_CHECKING:
    from sglang.srt.mem_cache.memory_pool import KVCache, MLATokenToKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.model_runner import ModelRunner

# Largest allowed difference between a module's table of cosines and sines and the values that its frequencies give: the
# table may be stored in bfloat16, which has 8 bits.
_TABLE_TOLERANCE = 0.02


def read_shape(model_runner: ModelRunner, ranks: int, rotation: Rotation) -> ModelShape:
    """The shape of what `model_runner` holds of the served model, with the heads of all `ranks` tensor-parallel ranks.

    Args:
        rotation: of the layers that are scored.

    Raises:
        TriAttentionError: an attention layer has a bias by position; all have a sliding window; those without one have
            different numbers of heads; or there is KV that belongs to none of them.
    """
    layers = attention_layers(model_runner.model)
    scored = scored_layers(layers)
    first = scored[0]
    latent = first.latent is not None
    for layer in layers:
        layer.check()
    for layer in scored:
        if (layer.latent is not None) != latent:
            raise UnsupportedModel("some of its layers have latent KV, and others have not")
        if layer.heads != first.heads:
            raise UnsupportedModel(f"layer {layer.number} has another number of heads than layer {first.number}")
    config = model_runner.model_config
    numbers = [layer.number for layer in layers]
    kept = _of_stage(model_runner, numbers, layers_with_kv(model_runner.token_to_kv_pool))
    # Only a model that says so has layers without attention, or without KV; their share of the pool stays empty.
    text = config.hf_text_config
    gaps = getattr(config.hf_config, "block_configs", None)
    if getattr(text, "num_kv_shared_layers", None):
        gaps = len(layers) == len(kept) == len(numbers_of(layers)) + text.num_kv_shared_layers
    if not (set(numbers) <= set(kept) if gaps else numbers == kept):
        raise UnsupportedModel(f"{len(layers)} attention layers were found for {len(kept)} KV layers")
    q_heads = config.get_total_num_attention_heads()
    # On CPUs SGLang adds empty heads until they split evenly.
    padded = getattr(config.hf_config, "original_num_attention_heads", q_heads) != q_heads
    if padded or first.heads[0] * ranks > q_heads:
        raise UnsupportedModel(f"its {q_heads} query heads do not split evenly over {ranks} ranks")
    if first.heads[0] * ranks < q_heads:
        raise UnsupportedModel(
            "with attention data parallelism, SGLang's code of this model splits its heads over all ranks, also those "
            "that compute other requests, and cannot serve it"
        )
    if latent and (len(set(rotation.rotates)) > 1 or rotation.rope.rotary_dim != first.rotary_width):
        raise UnsupportedModel("not all of its layers with latent KV turn all dims of their rotated keys, or none")
    return ModelShape(
        num_q_heads=q_heads,
        num_kv_heads=1 if latent else config.get_total_num_kv_heads(),
        head_dim=first.attention.head_dim,
        rope=rotation.rope,
        fingerprint=model_fingerprint(config.model_path, config.revision),
        variant=model_variant(config.model_path, config.revision, config.model_override_args),
        layers=numbers_of(scored),
        rotates=rotation.rotates,
        first_position=rotation.first_position,
        rotary_start=first.attention.head_dim - first.rotary_width,
    )


def read_ropes(model: torch.nn.Module, head_dim: int) -> list[Rope]:
    """The different rotary embeddings of a model that can turn heads of `head_dim` dims, used or not.

    Raises:
        UnsupportedModel: there are some, but none can be scored.
    """
    ropes: list[Rope] = []
    refusals = []
    for module in model.modules():
        try:
            found = [read_rope(module)] if is_rotary(module) else ropes_of_buffers(module)
        except UnsupportedModel as error:
            refusals.append(error)
            continue
        for rope in found:
            if rope.rotary_dim <= head_dim and not any(same_rope(rope, other) for other in ropes):
                ropes.append(rope)
    if refusals and not ropes:
        raise refusals[0]
    return ropes


def read_rope(rotary: Any) -> Rope:
    """Reads the frequencies of one of SGLang's rotary embedding modules.

    They come from the module's own formula in float32, not from its table, which may be stored in bfloat16; the table
    is then checked against them. Of LongRoPE, they are those for short contexts, in which a server with rounds stays.

    Raises:
        TriAttentionError: for a kind of module for which this is not known to be right.
    """
    frequencies, scaling = _frequencies_of(rotary)
    frequencies = frequencies.double().cpu()
    half = frequencies.numel()
    is_long = hasattr(rotary, "short_cos_sin_cache")
    for position in (1, 2):
        table = (rotary.short_cos_sin_cache if is_long else rotary.cos_sin_cache)[position].double().cpu()
        phases = frequencies * position
        expected = torch.cat((phases.cos(), phases.sin())) * scaling
        if table.numel() != 2 * half or (table - expected).abs().max() > _TABLE_TOLERANCE:
            raise UnsupportedModel("the table of its rotary embedding does not follow from its frequencies")
    return Rope(
        inv_freq=frequencies,
        attention_scaling=scaling,
        rotary_dim=rotary.rotary_dim,
        style="half" if is_long or rotary.is_neox_style else "interleaved",
    )


def _frequencies_of(rotary: Any) -> tuple[torch.Tensor, float]:
    """[F] radians per token, in float32, and the factor on cosines and sines."""
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.mrope import (
        Ernie4_5_VLRotaryEmbedding,
        MRotaryEmbedding,
        YaRNScalingMRotaryEmbedding,
    )
    from sglang.srt.layers.rotary_embedding.rope_variant import (
        DeepseekScalingRotaryEmbedding,
        DynamicNTKAlphaRotaryEmbedding,
        DynamicNTKScalingRotaryEmbedding,
        Gemma4RotaryEmbedding,
        Llama3RotaryEmbedding,
        Phi3LongRoPEScaledRotaryEmbedding,
    )
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    kind = type(rotary)
    # With several position axes (M-RoPE) too, every token that may be evicted has equal positions on all of them.
    plain = (RotaryEmbedding, Llama3RotaryEmbedding, Gemma4RotaryEmbedding)
    if kind in (*plain, MRotaryEmbedding, Ernie4_5_VLRotaryEmbedding):
        return rotary._compute_inv_freq(rotary.base), 1.0
    if kind in (YaRNScalingRotaryEmbedding, YaRNScalingMRotaryEmbedding, DeepseekScalingRotaryEmbedding):
        return rotary._compute_inv_freq(rotary.scaling_factor), float(rotary.mscale)
    if kind is LinearScalingRotaryEmbedding and len(rotary.scaling_factors) == 1:
        return rotary._compute_inv_freq(rotary.base) / rotary.scaling_factors[0], 1.0
    if kind in (DynamicNTKAlphaRotaryEmbedding, DynamicNTKScalingRotaryEmbedding):
        # Stretched once, for the longest context that the table has room for.
        factor = getattr(rotary, "scaling_factor", 1.0)
        stretch = getattr(rotary, "scaling_alpha", factor * factor - (factor - 1))
        dims = rotary.rotary_dim
        return rotary._compute_inv_freq(rotary.base * stretch ** (dims / (dims - 2))), 1.0
    if kind is Phi3LongRoPEScaledRotaryEmbedding:
        return rotary._compute_inv_freq(rotary.short_factor), float(rotary.short_mscale)
    raise UnsupportedModel(f"its rotary embedding is a {kind.__name__}, which cannot be scored yet")


def check_pool(model_runner: ModelRunner) -> None:
    """Raises TriAttentionError unless the KV pool is one of SGLang's plain ones, a slot being a row of each buffer.

    Window layers may have such a pool of their own, and layers that keep a state instead of KV need none.
    """
    from sglang.srt.disaggregation.decode import DecodeReqToTokenPool, HybridMambaDecodeReqToTokenPool
    from sglang.srt.mem_cache.memory_pool import (
        HybridLinearKVPool,
        HybridReqToTokenPool,
        ReqToTokenPool,
    )
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    pool = model_runner.token_to_kv_pool
    pools = [pool]
    if type(pool) is HybridLinearKVPool:
        pools = [pool.full_kv_pool]
    if type(pool) is SWAKVPool:
        _check_window_pool(model_runner, pool)
        pools = [pool.full_kv_pool, pool.swa_kv_pool]
    for pool in pools:
        check_slots(pool)
    rows, known = model_runner.req_to_token_pool, (ReqToTokenPool, HybridReqToTokenPool)
    if rows is None or type(rows) not in (*known, DecodeReqToTokenPool, HybridMambaDecodeReqToTokenPool):
        raise UnsupportedModel(f"its rows are kept in a {type(rows).__name__}")
    if rows._aux_cache is not None:
        raise UnsupportedModel(f"rounds do not compact its {type(rows._aux_cache).__name__}")
    key = pools[0].get_key_buffer(pools[0].start_layer)
    if key.dtype not in KINDS:
        raise UnsupportedModel(f"its KV pool holds {key.dtype}")


def check_slots(pool: KVCache) -> None:
    """Raises TriAttentionError unless a slot of the pool is a row of each head, or of latents, that can be moved."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    if type(pool) is MLATokenToKVPool:
        _check_latent_pool(pool)
    elif type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise UnsupportedModel(f"its KV pool is a {type(pool).__name__} of another layout than slots by heads")


def layers_with_kv(pool: KVCache) -> list[int]:
    """Numbers of the layers that a KV pool has room for. Layers that keep a state instead are not among them."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if isinstance(pool, HybridLinearKVPool):
        return sorted(pool.full_attention_layer_id_mapping)
    if isinstance(pool, SWAKVPool):
        # Its own first layer is 0 in every pipeline stage.
        return sorted(pool.layers_mapping)
    return list(range(pool.start_layer, pool.start_layer + pool.layer_num))


def _of_stage(model_runner: ModelRunner, numbers: Sequence[int], kept: Sequence[int]) -> list[int]:
    """Those of the layers `kept` that this pipeline stage runs, and those of `numbers`.

    SGLang gives a stage of some models, as Nemotron-H, room for the layers of all stages.
    """
    from sglang.srt.distributed.utils import get_pp_indices

    group = model_runner.pp_group
    if group.world_size == 1:
        return list(kept)
    first, end = get_pp_indices(model_runner.model_config.num_hidden_layers, group.rank_in_group, group.world_size)
    return [number for number in kept if first <= number < end or number in numbers]


def _check_latent_pool(pool: MLATokenToKVPool) -> None:
    """Raises TriAttentionError unless a row is a latent and a rotated key of one dtype, which can be scored here."""
    if pool.use_dsa or pool.kv_scale_buffer is not None:
        raise UnsupportedModel("its latent KV is packed together with scales, or with what an indexer reads")
    if pool.kv_cache_dim != pool.kv_lora_rank + pool.qk_rope_head_dim:
        raise UnsupportedModel(f"{pool.kv_cache_dim} numbers of each token are cached, more than its latent and key")


def _check_window_pool(model_runner: ModelRunner, pool: SWAKVPool) -> None:
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator

    allocator = model_runner.token_to_kv_pool_allocator
    if type(allocator) is not SWATokenToKVPoolAllocator or allocator.swa_req_ring:
        raise UnsupportedModel(f"the slots of its window layers are not mapped one by one ({type(allocator).__name__})")
    if model_runner.prefill_aware_swa:
        raise UnsupportedModel("its window layers go on reading the prompt")
    for layer in attention_layers(model_runner.model):
        if pool.layers_mapping[layer.number][1] != bool(layer.window):
            raise UnsupportedModel(f"its attention layer {layer.number} keeps its KV in the pool of other layers")
