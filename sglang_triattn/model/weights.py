"""The parameters of a model by how a decode step reads them, from config.json alone.

A step reads each matrix that all tokens pass through once, however many requests run. Of the routed experts of a layer
it reads those that a token of the batch was routed to, and of the input embedding one row per token.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fields import Fields, count

WEIGHT_DTYPES = ("bfloat16", "fp8", "int8", "int4")

_GROUP = 128
_ZERO_POINT_AND_SCALE_BITS = 4 + 16
# Open Compute Project, Microscaling Formats v1.0: 32 numbers of 4 bits share a scale of 8.
_MXFP4_BITS = 4 + 8 / 32


@dataclass(frozen=True)
class Weights:
    """Parameters of one model, all GPUs together.

    Attributes:
        attention: matrices of attention, which tensor parallelism splits.
        down: matrices that project to the latents of MLA, of which every GPU holds a copy.
        mlp: matrices of dense MLPs and of experts that every token passes.
        expert: matrices of one routed expert.
        experts, chosen: routed experts in a layer, and how many of them each token passes; 0 without experts.
        expert_layers: layers that have routed experts.
        router: matrices that choose experts, of which every GPU holds a copy.
        embedding: the input embedding; 0 if the output head is the same matrix.
        head: the output head.
        vectors: norms and biases.
    """

    attention: int
    mlp: int
    head: int
    embedding: int
    vectors: int
    down: int = 0
    expert: int = 0
    experts: int = 0
    chosen: int = 0
    expert_layers: int = 0
    router: int = 0

    @property
    def matrices(self) -> int:
        """Those of decoder layers, which quantisation shrinks."""
        return self.attention + self.down + self.mlp + self.expert_layers * self.experts * self.expert

    @property
    def others(self) -> int:
        """Those that quantisation leaves at 16 bits."""
        return self.router + self.embedding + self.head + self.vectors

    def touched(self, tokens: int) -> float:
        """Expected number of experts of a layer to which a batch of `tokens` is routed, each to `chosen` at random.

        A router that prefers some experts touches fewer.
        """
        return self.experts * (1 - (1 - self.chosen / self.experts) ** tokens) if self.experts else 0.0


@dataclass(frozen=True)
class Bits:
    """Bits per parameter of a model's matrices, scales included, and the dtype in words. All else has 16."""

    attention: float
    mlp: float
    experts: float
    words: str

    def total_bytes(self, weights: Weights) -> int:
        """Bytes of all weights."""
        attention = (weights.attention + weights.down) * self.attention
        experts = weights.expert_layers * weights.experts * weights.expert * self.experts
        return int((attention + weights.mlp * self.mlp + experts) / 8) + weights.others * 2

    def copied_bytes(self, weights: Weights, tp: int, dp: int) -> int:
        """Bytes that one of `tp` GPUs holds more than an even split of all weights.

        Every GPU holds the router and the projections to latents. With attention data parallelism, each of `dp` groups
        holds all of attention and the input embedding.
        """
        once = weights.down * self.attention / 8 + weights.router * 2
        groups = weights.attention * self.attention / 8 + weights.embedding * 2
        return int(once * (tp - 1) / tp + groups * (dp - 1) / tp)

    def read_bytes(self, weights: Weights, tp: int, dp: int, tokens: int) -> float:
        """Bytes of weights that one of `tp` GPUs reads in a decode step of `tokens` requests in `dp` groups.

        As SGLang splits a model by default: attention over the GPUs of a group, all else over all GPUs. The rows of the
        input embedding, one per request, are too few to count, and so is what norms add by being copied.
        """
        attention = weights.attention * self.attention / 8 / (tp // dp) + weights.down * self.attention / 8
        experts = weights.expert_layers * weights.touched(tokens) * weights.expert * self.experts / 8
        split = weights.mlp * self.mlp / 8 + experts + (weights.head + weights.vectors) * 2
        return attention + split / tp + weights.router * 2


@dataclass(frozen=True)
class WeightBytes:
    """The weights of one model in bytes.

    Attributes:
        total: all of them, on all GPUs together and without copies.
        origin: where that number comes from, in words.
        weights, bits: what they consist of; None if unknown. Every weight then counts as read in each step and as split
            evenly over the GPUs. If they make more or fewer bytes than `total`, each part is scaled by as much.
    """

    total: int
    origin: str
    weights: Weights | None = None
    bits: Bits | None = None

    def copied_bytes(self, tp: int, dp: int) -> int:
        """As `Bits.copied_bytes`."""
        if self.weights is None or self.bits is None:
            return 0
        return int(self.bits.copied_bytes(self.weights, tp, dp) * self.total / self.bits.total_bytes(self.weights))

    def read_bytes(self, tp: int, dp: int, tokens: int) -> float:
        """As `Bits.read_bytes`."""
        if self.weights is None or self.bits is None:
            return self.total / tp
        read = self.bits.read_bytes(self.weights, tp, dp, tokens)
        return read * self.total / self.bits.total_bytes(self.weights)


@dataclass(frozen=True)
class _Shape:
    """Decoder layers of four attention matrices, or those of MLA, a gated MLP of three matrices, and two norms.

    Attributes:
        bias: query, key and value projections always have a bias.
        head_norms: queries and keys have norms.
        experts, width: fields with the number and the width of routed experts; empty without experts.
        expert_bias: the matrices of experts and routers have a bias.
    """

    bias: bool = False
    head_norms: bool = False
    experts: str = ""
    width: str = ""
    expert_bias: bool = False


_DEEPSEEK = _Shape(experts="n_routed_experts", width="moe_intermediate_size")
# By model type.
_SHAPES = {
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": _DEEPSEEK,
    "gpt_oss": _Shape(experts="num_local_experts", width="intermediate_size", expert_bias=True),
    "granite": _Shape(),
    "kimi_k2": _DEEPSEEK,
    "llama": _Shape(),
    "mistral": _Shape(),
    "mixtral": _Shape(experts="num_local_experts", width="intermediate_size"),
    "phi3": _Shape(),
    "qwen2": _Shape(bias=True),
    "qwen3": _Shape(head_norms=True),
    "qwen3_moe": _Shape(head_norms=True, experts="num_experts", width="moe_intermediate_size"),
}
_DENSE = ("intermediate_size",)
_CHOSEN = ("num_experts_per_tok", "experts_per_token")


def read_weights(fields: Fields, *, layers: int, q_heads: int, kv_heads: int, head_dim: int) -> Weights | None:
    """The parameters of a model; None if its type is not known, or a field that decides them is missing.

    Args:
        fields: from `text_fields`.
        layers, q_heads, kv_heads, head_dim: as the file has them; heads of latent KV are read from `fields`.
    """
    shape = _SHAPES.get(str(fields.get("model_type")))
    needed = ("hidden_size", "vocab_size", *((shape.experts, shape.width) if shape and shape.experts else _DENSE))
    if shape is None or fields.get("vision_config") or any(fields.get(name) is None for name in needed):
        return None
    hidden, vocabulary = count(fields, "hidden_size"), count(fields, "vocab_size")
    tied = bool(fields.get("tie_word_embeddings"))
    down, attention, vectors = 0, hidden * (2 * q_heads + 2 * kv_heads) * head_dim, 2 * hidden
    if fields.get("kv_lora_rank"):
        down, attention, norms = _latent_attention(fields, hidden, q_heads)
        vectors += norms
    else:
        vectors += _attention_vectors(fields, shape, hidden, (q_heads + 2 * kv_heads) * head_dim, q_heads, head_dim)
    common = {
        "attention": layers * attention,
        "down": layers * down,
        "embedding": 0 if tied else vocabulary * hidden,
        "head": vocabulary * hidden,
    }
    if not shape.experts:
        inner = count(fields, "intermediate_size")
        vectors += 2 * inner + hidden if fields.get("mlp_bias") else 0
        return Weights(mlp=layers * 3 * hidden * inner, vectors=layers * vectors + hidden, **common)
    found = _experts(fields, shape, hidden, layers)
    if found is None:
        return None
    vectors = layers * vectors + hidden + found.pop("vectors")
    return Weights(vectors=vectors, **common, **found)


def bits_of(config: Mapping[str, Any], dtype: str | None) -> Bits:
    """How many bits the parameters of a model have.

    Args:
        config: content of its config.json.
        dtype: one of WEIGHT_DTYPES; None follows the config's quantization_config, or means 16 bits without one.

    Raises:
        TriAttentionError: the size of weights quantised in this way is not known.
    """
    quantized = config.get("quantization_config") or (config.get("text_config") or {}).get("quantization_config")
    if dtype is None and quantized:
        return _quantized_bits(quantized)
    words = dtype or "bfloat16"
    bits = {"bfloat16": 16.0, "fp8": 8.0, "int8": 8.0, "int4": _with_groups(4, _GROUP)}[words]
    return Bits(bits, bits, bits, words)


def _latent_attention(fields: Fields, hidden: int, heads: int) -> tuple[int, int, int]:
    """(copied matrices, split matrices, norms) of one layer of MLA."""
    latent, turned = count(fields, "kv_lora_rank"), count(fields, "qk_rope_head_dim")
    plain, value = count(fields, "qk_nope_head_dim"), count(fields, "v_head_dim")
    down, split, norms = hidden * (latent + turned), heads * latent * (plain + value) + heads * value * hidden, latent
    if not fields.get("q_lora_rank"):
        return down, split + hidden * heads * (plain + turned), norms
    queries = count(fields, "q_lora_rank")
    return down + hidden * queries, split + queries * heads * (plain + turned), norms + queries


def _attention_vectors(fields: Fields, shape: _Shape, hidden: int, projected: int, q_heads: int, head_dim: int) -> int:
    """Norms, biases and sinks of one layer's attention."""
    vectors = 2 * head_dim if shape.head_norms or fields.get("use_qk_norm") else 0
    if shape.bias:
        return vectors + projected
    if fields.get("attention_bias"):
        # GLM-4.5 and later have none after attention.
        vectors += projected + (0 if fields.get("model_type") == "glm4_moe" else hidden)
    return vectors + (q_heads if shape.expert_bias else 0)


def _experts(fields: Fields, shape: _Shape, hidden: int, layers: int) -> dict[str, int] | None:
    """The fields of Weights that experts decide, with the biases of experts as `vectors`; None if a size is missing."""
    chosen = next((name for name in _CHOSEN if fields.get(name) is not None), None)
    dense = _dense_layers(fields, layers)
    if chosen is None or (dense and fields.get("intermediate_size") is None):
        return None
    experts, width = count(fields, shape.experts), count(fields, shape.width)
    shared = (fields.get("n_shared_experts") or 0) * width
    with_experts = layers - dense
    inner = count(fields, "intermediate_size") if dense else 0
    return {
        "mlp": 3 * hidden * (dense * inner + with_experts * shared),
        "expert": 3 * hidden * width,
        "experts": experts,
        "chosen": min(count(fields, chosen), experts),
        "expert_layers": with_experts,
        "router": with_experts * experts * hidden,
        "vectors": with_experts * experts * (2 * width + hidden + 1) if shape.expert_bias else 0,
    }


def _dense_layers(fields: Fields, layers: int) -> int:
    """Layers without routed experts, of a model that has some."""
    step, listed = fields.get("decoder_sparse_step") or 1, fields.get("mlp_only_layers") or ()
    first = min(fields.get("first_k_dense_replace") or 0, layers)
    return sum(number < first or number in listed or (number + 1) % step != 0 for number in range(layers))


def _quantized_bits(quantized: Mapping[str, Any]) -> Bits:
    """The bits of a quantization_config."""
    method = str(quantized.get("quant_method"))
    if method == "fp8":
        return Bits(8, 8, 8, method)
    if method == "mxfp4":
        return Bits(16, 16, _MXFP4_BITS, "mxfp4 experts, all else bfloat16")
    if method in ("awq", "gptq"):
        groups = [{"num_bits": quantized.get("bits"), "group_size": quantized.get("group_size")}]
    else:
        groups = [group.get("weights") or {} for group in (quantized.get("config_groups") or {}).values()]
    found = {(group.get("num_bits"), group.get("group_size")) for group in groups}
    number, group = found.pop() if len(found) == 1 else (None, None)
    if not isinstance(number, int):
        raise TriAttentionError(
            f"The size of weights quantised by {method} cannot be estimated: give it, such as --weights 18.5G."
        )
    bits = _with_groups(number, group)
    return Bits(bits, bits, bits, f"{method}, {number} bits")


def _with_groups(bits: int, group: int | None) -> float:
    """Bits per parameter, including a scale and a zero point for each group of `group` parameters."""
    return bits + (_ZERO_POINT_AND_SCALE_BITS / group if group and group > 0 else 0)
