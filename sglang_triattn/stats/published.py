"""The `.pt` files published with the paper (docs/method.md)."""

import re
import zipfile
from pathlib import Path
from typing import cast

import torch

from sglang_triattn.errors import quoted
from sglang_triattn.stats.content import check_size
from sglang_triattn.stats.query_stats import RECALIBRATE, QueryStats, StatsError

_PT_KEY = re.compile(r"layer(\d{2,4})_head(\d{2,4})")
LARGEST_HEAD = 1 << 16
"""More dims than any head has."""


def read_pt(path: Path) -> QueryStats:
    """Reads one; whether its numbers are possible is not checked.

    Raises:
        StatsError: it lacks heads or is of another kind; or what `torch.load` raises.
    """
    with zipfile.ZipFile(path) as archive:
        # Its parts may be packed.
        check_size(path, sum(part.file_size for part in archive.infolist()))
    content = torch.load(path, map_location="cpu", weights_only=True)
    try:
        metadata, entries = content["metadata"], content["stats"]
        style = metadata.get("rope_style", "half")
        # A key of another form has no match, which raises one of the errors below.
        matches = {key: cast(re.Match, _PT_KEY.fullmatch(key)) for key in entries}
        where = {tuple(map(int, matches[key].groups())): entry for key, entry in entries.items()}
        layers, heads = (1 + max(column) for column in zip(*where, strict=True))
        if len(where) != layers * heads:
            raise StatsError(
                f"Statistics file {path} has {len(where)} of {layers * heads} query heads, but needs all: {RECALIBRATE}"
            )

        def stacked(name: str) -> torch.Tensor:
            rows = [where[layer, head][name] for layer in range(layers) for head in range(heads)]
            # A view may claim any number of elements.
            if any(row.layout is not torch.strided or row.ndim != 1 or len(row) > LARGEST_HEAD for row in rows):
                raise ValueError(name)
            rows = [row.float() for row in rows]
            return torch.stack(rows).view(layers, heads, -1)

        stats = QueryStats(
            mean=torch.complex(stacked("q_mean_real"), stacked("q_mean_imag")),
            abs_mean=stacked("q_abs_mean"),
            num_kv_heads=None,
            head_dim=int(metadata["head_dim"]),
            rope=None,
            fingerprint=None,
            token_count=None,
            source=str(path),
        )
    except StatsError:
        raise
    except Exception as error:
        raise StatsError(f"{path} is not a TriAttention statistics file: {RECALIBRATE}") from error
    if style != "half":
        raise StatsError(
            f"Statistics file {path} has RoPE style {quoted(style)}, but .pt files must be 'half': {RECALIBRATE}"
        )
    return stats
