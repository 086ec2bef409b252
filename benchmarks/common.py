"""What the benchmarks share: model shapes, the machine's description, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch


@dataclass(frozen=True)
class Model:
    """Attention of one model: layers, query heads, KV heads, head_dim."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int


MODELS = (
    Model("Qwen3-8B", 36, 32, 8, 128),
    Model("Llama-3-8B", 32, 32, 8, 128),
    Model("SmolLM2-135M", 30, 9, 3, 64),
)


def machine() -> dict[str, str | int]:
    """Where figures were measured."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"cpu": cpu, "cores": os.cpu_count() or 1, "torch_threads": torch.get_num_threads(), "gpu": gpu}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("sglang-triattn", "torch", "triton", "sglang"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def report(rows: list[dict], path: str | None, quick: bool) -> None:
    """Prints `rows`, all with the same keys, as a table, and writes them to `path` with what made them."""
    text = [[f"{v:.3f}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows]
    header = list(rows[0])
    widths = [max(len(line[i]) for line in [header, *text]) for i in range(len(header))]
    for line in [header, *text]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    if path:
        content = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": quick,
            "machine": machine(),
            "versions": versions(),
            "rows": rows,
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n")
