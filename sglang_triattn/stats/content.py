"""The content of a `.safetensors` file, read at once: what happens to the file later does not matter."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import torch
from safetensors.torch import load

from sglang_triattn.stats.query_stats import RECALIBRATE, StatsError

LARGEST_BYTES = 1 << 28
"""Far more than the statistics of any model, so that a wrong file does not fill the memory."""


def check_size(path: Path, size: int) -> None:
    """Raises StatsError if `size` bytes are more than any statistics file has."""
    if size > LARGEST_BYTES:
        raise StatsError(
            f"Statistics file {path} holds {size} bytes, but those of no model are above {LARGEST_BYTES}: {RECALIBRATE}"
        )


def read_content(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of a file. They are copies: `safe_open` would map the file, which may be truncated later.

    Raises:
        StatsError: it is too large.
        OSError, SafetensorError: it cannot be read, or is damaged.
    """
    with path.open("rb") as file:
        check_size(path, os.fstat(file.fileno()).st_size)
        content = file.read(LARGEST_BYTES + 1)
    check_size(path, len(content))
    tensors = load(content)
    # `load` has checked the header, but does not return the metadata.
    (length,) = struct.unpack_from("<Q", content)
    return tensors, json.loads(content[8 : 8 + length]).get("__metadata__") or {}
