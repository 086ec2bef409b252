"""The loaded model's attention layers, rotary embedding and KV pool, as the scorer needs them.

SGLang parts: `RadixAttention` (sglang/srt/layers/radix_attention.py), `RotaryEmbedding` (layers/rotary_embedding),
`MHATokenToKVPool` (mem_cache/memory_pool.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.kernels.pools import KINDS
from sglang_triattn.model.fingerprint import model_fingerprint
from sglang_triattn.model.rope import Rope
from sglang_triattn.stats.file import ModelShape

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.model_executor.model_runner import ModelRunner

# Largest allowed difference between a module's table of cosines and sines and the values that its frequencies give: the
# table may be stored in bfloat16, which has 8 bits.
_TABLE_TOLERANCE = 0.02


class UnsupportedModel(TriAttentionError):
    """The loaded model cannot be compressed; `reason` completes "because ..."."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"The served model does not work with --enable-triattention, because {reason}: start without "
            "--enable-triattention."
        )
        self.reason = reason


def read_shape(model_runner: ModelRunner, ranks: int) -> ModelShape:
    """The shape of the model that `model_runner` serves, with the heads of all `ranks` tensor-parallel ranks.

    Raises:
        TriAttentionError: an attention layer has a sliding window, a bias by position, or no rotary embedding; if
            its rotary embedding or number of heads differs from the other layers'; or if its rotary embedding cannot be
            scored.
    """
    layers = attention_layers(model_runner.model)
    pool = model_runner.token_to_kv_pool
    first, rotary = layers[0]
    rope = read_rope(rotary)
    for attention, other in layers:
        _check_attention(attention)
        if other is not rotary and not _same_rope(read_rope(other), rope):
            raise UnsupportedModel(
                f"layer {attention.layer_id} has another rotary embedding than layer {first.layer_id}"
            )
        if (attention.tp_q_head_num, attention.tp_k_head_num) != (first.tp_q_head_num, first.tp_k_head_num):
            raise UnsupportedModel(
                f"layer {attention.layer_id} has another number of heads than layer {first.layer_id}"
            )
    ids = [attention.layer_id for attention, _ in layers]
    if ids != list(range(pool.layer_num)):
        raise UnsupportedModel(
            f"{len(ids)} attention layers with rotary embeddings were found for {pool.layer_num} KV layers"
        )
    config = model_runner.model_config
    q_heads = config.get_total_num_attention_heads()
    # On CPUs SGLang adds empty heads until they split evenly.
    padded = getattr(config.hf_config, "original_num_attention_heads", q_heads) != q_heads
    if padded or first.tp_q_head_num * ranks != q_heads:
        raise UnsupportedModel(f"its {q_heads} query heads do not split evenly over {ranks} ranks")
    return ModelShape(
        num_layers=len(layers),
        num_q_heads=q_heads,
        num_kv_heads=config.get_total_num_kv_heads(),
        head_dim=first.head_dim,
        rope=rope,
        fingerprint=model_fingerprint(model_runner.model_config.model_path),
    )


def read_rope(rotary: RotaryEmbedding) -> Rope:
    """Reads the frequencies of one of SGLang's rotary embedding modules.

    They come from the module's own formula in float32, not from its table, which may be stored in bfloat16; the table
    is then checked against them.

    Raises:
        TriAttentionError: for a kind of module for which this is not known to be right.
    """
    from sglang.srt.layers.rotary_embedding.base import LinearScalingRotaryEmbedding, RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.mrope import MRotaryEmbedding, YaRNScalingMRotaryEmbedding
    from sglang.srt.layers.rotary_embedding.rope_variant import Llama3RotaryEmbedding
    from sglang.srt.layers.rotary_embedding.yarn import YaRNScalingRotaryEmbedding

    scaling = 1.0
    # With several position axes (M-RoPE) too, every token that may be evicted has equal positions on all of them.
    if type(rotary) in (RotaryEmbedding, Llama3RotaryEmbedding, MRotaryEmbedding):
        frequencies = rotary._compute_inv_freq(rotary.base)
    elif type(rotary) is YaRNScalingRotaryEmbedding or type(rotary) is YaRNScalingMRotaryEmbedding:
        frequencies = rotary._compute_inv_freq(rotary.scaling_factor)
        scaling = float(rotary.mscale)
    elif type(rotary) is LinearScalingRotaryEmbedding and len(rotary.scaling_factors) == 1:
        frequencies = rotary._compute_inv_freq(rotary.base) / rotary.scaling_factors[0]
    else:
        raise UnsupportedModel(f"its rotary embedding is a {type(rotary).__name__}, which cannot be scored yet")
    frequencies = frequencies.double().cpu()
    half = frequencies.numel()
    for position in (1, 2):
        table = rotary.cos_sin_cache[position].double().cpu()
        phases = frequencies * position
        expected = torch.cat((phases.cos(), phases.sin())) * scaling
        if table.numel() != 2 * half or (table - expected).abs().max() > _TABLE_TOLERANCE:
            raise UnsupportedModel("the table of its rotary embedding does not follow from its frequencies")
    return Rope(
        inv_freq=frequencies,
        attention_scaling=scaling,
        rotary_dim=rotary.rotary_dim,
        style="half" if rotary.is_neox_style else "interleaved",
    )


def check_pool(model_runner: ModelRunner) -> None:
    """Raises TriAttentionError unless the KV pool is SGLang's plain one, a slot being a row of each layer's buffer."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

    pool = model_runner.token_to_kv_pool
    if type(pool) is not MHATokenToKVPool or pool.kv_cache_layout != "nhd":
        raise UnsupportedModel(f"its KV pool is a {type(pool).__name__} of another layout than slots by heads")
    rows = model_runner.req_to_token_pool
    if type(rows) is not ReqToTokenPool:
        raise UnsupportedModel(f"its rows are kept in a {type(rows).__name__}")
    if rows._aux_cache is not None:
        raise UnsupportedModel(f"a {type(rows._aux_cache).__name__} beside its rows is not compacted with them")
    key = pool.get_key_buffer(0)
    if key.dtype not in KINDS:
        raise UnsupportedModel(f"its KV pool holds {key.dtype}")


def attention_layers(model: torch.nn.Module) -> list[tuple[RadixAttention, RotaryEmbedding]]:
    """(RadixAttention, rotary embedding) of every layer, by layer number.

    Raises:
        UnsupportedModel: there are none, or one has no rotary embedding.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    pairs = []
    for module in model.modules():
        attention = next((child for child in module.children() if isinstance(child, RadixAttention)), None)
        if attention is None:
            continue
        rotary = getattr(module, "rotary_emb", None)
        if rotary is None:
            raise UnsupportedModel(f"its attention layer {attention.layer_id} has no rotary embedding beside it")
        pairs.append((attention, rotary))
    if not pairs:
        raise UnsupportedModel("it has no attention layers that SGLang keeps KV for")
    return sorted(pairs, key=lambda pair: pair[0].layer_id)


def _check_attention(attention: RadixAttention) -> None:
    reasons = (
        (
            attention.sliding_window_size > 0,
            f"has a sliding window of {attention.sliding_window_size} tokens",
        ),
        (attention.is_cross_attention, "is cross attention"),
        (attention.use_irope, "is local to chunks"),
        (attention.pos_encoding_mode != "NONE", "adds a bias by position"),
        (attention.xai_temperature_len > 0, "scales its logits by length"),
    )
    for applies, reason in reasons:
        if applies:
            raise UnsupportedModel(f"its attention layer {attention.layer_id} {reason}")


def _same_rope(one: Rope, other: Rope) -> bool:
    return (
        torch.equal(one.inv_freq, other.inv_freq)
        and one.attention_scaling == other.attention_scaling
        and one.style == other.style
    )
