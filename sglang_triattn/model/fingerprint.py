"""A model's fingerprint, which ties a statistics file to the model it was measured on.

It is made from what determines the queries, survives quantisation and can be read in milliseconds: the architecture
fields of config.json, and the small vectors that weight-only quantisers leave unchanged. Norms in front of linear
layers are left out on purpose, because AWQ and SmoothQuant fold their scales into them.

A fine-tune merged from LoRA has the norms and biases of its base, so its fingerprint is the base's. What a launch
measures and keeps is therefore also named by a model's variant: a part of its query weights, and overridden settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ARCHITECTURE_FIELDS = (
    "architectures",
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
DIGITS = 32
VARIANT_DIGITS = 8
_FINAL_NORM = re.compile(r"(?:[a-z_]+\.)*(?:norm|final_norm|final_layernorm|ln_f)\.weight")
_ENCODER = re.compile(r"(?:model\.)?(?:visual|vision_[a-z]+|multi_modal_[a-z]+)\.")
_QUERY_VECTOR = re.compile(
    r"(?:[a-z_]+\.)*(?:layers|h|blocks)\.0\.(?:self_attn|attn|attention|self_attention)\."
    r"(?:[qk]_norm\.weight|[qk]_layernorm\.weight|[qk]_proj\.bias)"
)

_QUERY_MATRIX = re.compile(
    r"(?:[a-z_]+\.)*(?:layers|h|blocks)\.\d+\.(?:self_attn|attn|attention|self_attention|mixer)\."
    r"(?:q_proj|q_a_proj|q_b_proj|qkv_proj|query_key_value|c_attn|Wqkv)\.weight"
)
_PLAIN = ("BF16", "F16", "F32")
"""Dtypes of weights that no quantiser has changed, in safetensors' words."""
ROWS, COLUMNS = 8, 64
"""How much of each query matrix counts: LoRA changes every element of the matrices that it changes."""


def model_fingerprint(model_path: str, revision: str | None = None) -> str | None:
    """Fingerprint of a model: 32 hexadecimal digits, or None without a local config.json (a bare GGUF file, say).

    A fine-tune that changed the final norm, or a query or key norm or bias of the first layer, gets another
    fingerprint; a quantised, converted or re-sharded copy of the same weights gets the same. Without safetensors files
    only the configuration counts.

    Args:
        model_path: a model folder, or a hub name whose files are in the local Hugging Face cache; nothing is
            downloaded.
    """
    folder = local_folder(model_path, revision)
    if folder is None:
        return None
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    digest = hashlib.sha256(canonical_config(config).encode())
    for name, content in sorted(_vectors(folder).items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()[:DIGITS]


def model_variant(model_path: str, revision: str | None = None, overrides: Mapping[str, Any] | None = None) -> str:
    """The variant among models of one fingerprint: "", or "o" and "w", each with 8 hexadecimal digits.

    "o" is for overridden settings, and "w" for the query weights, which a quantised copy does not show.

    Args:
        overrides: settings that replace those of config.json (SGLang's --json-model-override-args).
    """
    parts = []
    if overrides:
        parts.append("o" + _short(json.dumps(overrides, sort_keys=True).encode()))
    folder = local_folder(model_path, revision)
    matrices = {} if folder is None else _matrices(folder)
    if matrices:
        parts.append("w" + _short(b"".join(name.encode() + b"\0" + matrices[name] for name in sorted(matrices))))
    return "-".join(parts)


def shown_name(model_path: str) -> str:
    """What a file says of a model: its hub name or the name of its folder, not where that folder is."""
    return Path(model_path).resolve().name if Path(model_path).exists() else model_path


def without_weights(variant: str) -> str:
    """The variant of a quantised copy of this model."""
    return "-".join(part for part in variant.split("-") if not part.startswith("w"))


def with_look_ups(variant: str) -> str:
    """The variant under which statistics of this model that hold look-up weights are kept."""
    return "-".join(filter(None, ("look-ups", variant)))


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:VARIANT_DIGITS]


def canonical_config(config: dict) -> str:
    """Canonical JSON of the fields that define the architecture, the same for old and new spellings.

    transformers 5 writes `rope_parameters`, older versions `rope_theta` and `rope_scaling`; defaults that a file leaves
    out are filled in.

    Args:
        config: content of config.json.
    """
    # Older files of vision-language models have no text_config, whose model_type is one of its own.
    whole = {name: config.get(name) for name in ("architectures", "model_type")}
    config = {**config, **(config.get("text_config") or {}), **whole}
    fields = {name: config.get(name) for name in ARCHITECTURE_FIELDS}
    heads = fields["num_attention_heads"]
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = heads
    if fields["head_dim"] is None and heads and fields["hidden_size"]:
        fields["head_dim"] = fields["hidden_size"] // heads
    fields["rope"] = _canonical_rope(config)
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))


def _canonical_rope(config: dict) -> dict:
    given = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    defaults = {
        "rope_theta": config.get("rope_theta") or 10000.0,
        "rope_type": given.pop("type", "default"),
        "partial_rotary_factor": config.get("partial_rotary_factor") or 1.0,
    }
    rope = {**defaults, **{name: value for name, value in given.items() if value is not None}}
    if rope["rope_type"] == "mrope":
        # An older name of the default with a mrope_section.
        rope["rope_type"] = "default"
    # 10000 and 10000.0 are the same base.
    return {name: float(value) if type(value) is int else value for name, value in rope.items()}


def local_folder(model_path: str, revision: str | None = None) -> Path | None:
    """Folder of a model, possibly in the local Hugging Face cache; None if it is in neither place."""
    if Path(model_path).is_dir():
        return Path(model_path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model_path, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return None


def _vectors(folder: Path) -> dict[str, bytes]:
    """Name and bfloat16 bytes of the vectors that identify the weights, from the folder's safetensors files.

    Rounding to bfloat16 makes copies stored in float32, float16 and bfloat16 agree. All-zero vectors are skipped,
    because some quantisers add zero biases.
    """
    vectors = {}
    for name, plain, file in _tensors(folder):
        if _FINAL_NORM.fullmatch(plain) or _QUERY_VECTOR.fullmatch(plain):
            tensor = file.get_tensor(name)
            if tensor.ndim == 1 and tensor.is_floating_point() and tensor.any():
                vectors[plain] = _bfloat16_bytes(tensor)
    return vectors


def _matrices(folder: Path) -> dict[str, bytes]:
    """Name and bfloat16 bytes of a corner of each query matrix that is not quantised."""
    matrices = {}
    for name, plain, file in _tensors(folder):
        if _QUERY_MATRIX.fullmatch(plain):
            matrix = file.get_slice(name)
            if matrix.get_dtype() in _PLAIN and len(matrix.get_shape()) == 2:
                matrices[plain] = _bfloat16_bytes(matrix[:ROWS, :COLUMNS])
    return matrices


def _bfloat16_bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return tensor.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def _tensors(folder: Path) -> Iterator[tuple[str, str, Any]]:
    """Each tensor of the language model: its name, the same as a plain language model calls it, and its open file.

    What cannot be read is left out.
    """
    from safetensors import SafetensorError, safe_open

    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if not _ENCODER.match(name):
                        # Vision-language models hold their language model under several names.
                        yield name, name.replace("language_model.", ""), file
        except (OSError, SafetensorError):
            continue


def _weight_files(folder: Path) -> list[Path]:
    """The checkpoint's safetensors files; if there is an index, it says which of them count."""
    try:
        index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
        names = set(index["weight_map"].values())
    except (OSError, ValueError, KeyError):
        names = {path.name for path in folder.glob("*.safetensors")}
        if "model.safetensors" in names:
            names = {"model.safetensors"}
    return sorted(folder / name for name in names)
