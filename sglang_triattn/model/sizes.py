"""Sizes read from a model's config.json: KV bytes per token, context limit, weights.

Models that compression does not cover are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_triattn.errors import TriAttentionError
from sglang_triattn.model.fields import count, text_fields
from sglang_triattn.model.fingerprint import local_folder
from sglang_triattn.model.layout import AttentionLayout, read_layout
from sglang_triattn.model.weights import WeightBytes, Weights, bits_of, read_weights

FP8_KV = ("fp8_e4m3", "fp8_e5m2")
CONTEXT_FIELDS = ("max_position_embeddings", "max_seq_len", "n_positions")
MODEL_HELP = "config.json of a Hugging Face model, its folder, or a name in the local cache of Hugging Face"


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of one model, all tensor-parallel ranks together; heads are those of the scored layers.

    Attributes:
        context: longest logical length in tokens.
        kv_dtype: the dtype that SGLang's `--kv-cache-dtype auto` selects.
        weights: its parameters; None if unknown.
    """

    model_type: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int
    kv_dtype: str
    weights: Weights | None
    layout: AttentionLayout

    @property
    def parameters(self) -> int | None:
        return None if self.weights is None else self.weights.matrices + self.weights.others

    def check_ranks(self, ranks: int) -> None:
        """Raises TriAttentionError unless the heads split evenly over `ranks` GPUs."""
        if self.q_heads % ranks or (self.kv_heads % ranks and ranks % self.kv_heads):
            raise TriAttentionError(
                f"The {self.q_heads} query heads and {self.kv_heads} KV heads of this {self.model_type} model do not "
                f"split evenly over --tp {ranks}: use a number that divides them."
            )

    def bytes_per_token(self, kv_dtype: str, ranks: int = 1) -> int:
        """KV bytes of one token on one of `ranks` GPUs, without layers that have a pool for their window."""
        return self.layout.elements(ranks) * element_bytes(kv_dtype)

    def window_bytes(self, kv_dtype: str, ranks: int = 1) -> int:
        """KV bytes of one token in the pool of window layers on one of `ranks` GPUs; 0 without such a pool."""
        return self.layout.elements(ranks, windows=True) * element_bytes(kv_dtype)


def element_bytes(kv_dtype: str) -> int:
    """Bytes of one number in a KV cache of this dtype."""
    return 1 if kv_dtype in FP8_KV else 2


def found_path(model: str) -> Path | None:
    """A model's config.json or folder, by path or by its name in the local Hugging Face cache; None if it is nowhere.

    A path that exists comes first.
    """
    return Path(model) if Path(model).exists() else local_folder(model)


def load_config(model: str) -> dict[str, Any]:
    """Content of a config.json, given as the file, its folder, or the name of a model in the local Hugging Face cache.

    Raises:
        TriAttentionError: it cannot be read.
    """
    path = found_path(model) or Path(model)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TriAttentionError(
            f"--model {model} cannot be read ({error.strerror}): give a config.json, a folder that holds one, "
            "or the name of a model in the local cache of Hugging Face."
        ) from error
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise TriAttentionError(f"{file} is not a JSON object: give the config.json of a Hugging Face model.")
    return config


def read_sizes(config: Mapping[str, Any]) -> ModelSizes:
    """The sizes in the content of a config.json.

    Raises:
        TriAttentionError: none of its layers attends to all tokens, or a size is missing.
    """
    merged = text_fields(config)
    name = str(config.get("model_type") or "unknown")
    layout = read_layout(config)
    if not layout.scored:
        raise TriAttentionError(
            f"The model type {name} cannot be planned, because none of its layers attends to all tokens: use a model "
            "that has such layers."
        )
    layer = layout.layers[layout.scored[0]]
    sizes = {
        "layers": len(layout.layers),
        "q_heads": layer.q_heads,
        "kv_heads": layer.kv_heads,
        "head_dim": layer.head_dim,
    }
    return ModelSizes(
        model_type=name,
        context=context_limit(merged),
        kv_dtype=kv_dtype_of(merged),
        weights=read_weights(merged, **sizes),
        layout=layout,
        **sizes,
    )


def weight_bytes(
    sizes: ModelSizes, config: Mapping[str, Any], dtype: str | None = None, given: int | None = None
) -> WeightBytes:
    """The weights of a model, estimated unless `given` is the size of all in bytes; `dtype` as for `bits_of`.

    Raises:
        TriAttentionError: the dtype or the shapes of the layers are unknown, and no size is given.
    """
    if given is not None:
        try:
            return WeightBytes(given, "given", sizes.weights, bits_of(config, dtype))
        except TriAttentionError:
            return WeightBytes(given, "given")
    if sizes.weights is None:
        raise TriAttentionError(
            f"The weights of the model type {sizes.model_type} cannot be estimated: give their size, such as "
            "--weights 18.5G."
        )
    bits = bits_of(config, dtype)
    origin = f"estimated: {sizes.parameters:,} parameters, {bits.words}"
    return WeightBytes(bits.total_bytes(sizes.weights), origin, sizes.weights, bits)


def context_limit(config: Mapping[str, Any]) -> int:
    """Context limit as SGLang derives it: a RoPE factor counts unless the config already gives the stretched length."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    stretched = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    return int(count(config, *CONTEXT_FIELDS) * (1 if stretched else scaling.get("factor") or 1))


def kv_dtype_of(config: Mapping[str, Any]) -> str:
    """The dtype that SGLang's `--kv-cache-dtype auto` selects."""
    quantized = _object(config.get("quantization_config"))
    scheme = _object(quantized.get("kv_cache_scheme"))
    if quantized.get("kv_cache_quant_algo") == "FP8" or (scheme.get("type"), scheme.get("num_bits")) == ("float", 8):
        return "fp8_e4m3"
    # SGLang serves float32 checkpoints in 16 bits as well.
    return "bfloat16" if "bfloat16" in (config.get("dtype"), config.get("torch_dtype")) else "float16"


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
