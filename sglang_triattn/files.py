"""Atomic file writes: a file appears complete or not at all."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Atomically replaces `path` with a safetensors file whose mode follows the umask.

    Raises:
        OSError or SafetensorError: it cannot be written; `path` is then unchanged.
    """
    temporary = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
        os.close(handle)
        save_file(dict(tensors), temporary, dict(metadata))
        # mkstemp creates private files; files meant to be shared follow the umask.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


def remove_unfinished(path: Path) -> None:
    """Removes the temporary files that a killed `write_safetensors` of `path` left beside it."""
    for leftover in path.parent.glob(f"{path.name}*.tmp"):
        leftover.unlink(missing_ok=True)
