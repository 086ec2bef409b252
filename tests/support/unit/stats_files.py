"""Statistics files that this version does not write: published, of version 1, and damaged ones."""

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sample_stats import FREQUENCIES, HEAD_DIM, HEADS, LAYERS
from sglang_triattn.errors import TriAttentionError
from sglang_triattn.stats.file import save_stats


def published(path: Path, *, style="half", drop=(), entry=None, head_dim=HEAD_DIM) -> Path:
    """A file in the schema of the published ones (docs/method.md)."""
    entries = {}
    for layer in range(LAYERS):
        for head in range(HEADS):
            real, imag = torch.full((FREQUENCIES,), float(layer)), torch.full((FREQUENCIES,), float(head))
            values = {"q_mean_real": real, "q_mean_imag": imag, "q_abs_mean": torch.full((FREQUENCIES,), 9.0)}
            entries[f"layer{layer:02d}_head{head:02d}"] = values | (entry or {})
    for key in drop:
        del entries[key]
    torch.save({"metadata": {"rope_style": style, "head_dim": head_dim}, "stats": entries}, path)
    return path


def assert_one_sentence(error: BaseException) -> None:
    text = str(error)
    assert "\n" not in text
    assert text.endswith(".")
    assert isinstance(error, TriAttentionError)


def damage(path: Path, tensors=None, metadata=None, drop=()) -> Path:
    """Rewrites a good file with some tensors or metadata fields replaced or dropped."""
    with safe_open(path, framework="pt") as file:
        fields = file.metadata()
    content = load_file(path) | (tensors or {})
    fields |= metadata or {}
    for name in drop:
        content.pop(name, None)
        fields.pop(name, None)
    save_file(content, path, fields)
    return path


def version_1(path: Path, saved) -> Path:
    """A file as the first version wrote it."""
    save_stats(saved, path)
    return damage(path, metadata={"format_version": "1"}, drop=["layers", "rotates", "unrotated_mean"])
