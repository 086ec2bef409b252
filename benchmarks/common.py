"""Shared by the benchmarks: model shapes, the machine's description, tables and JSON."""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

import torch


@dataclass(frozen=True)
class Model:
    """Attention shape of a model: layers, query heads, KV heads, head_dim; rotary_dim None if RoPE turns all dims."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int | None = None


MODELS = (
    Model("Qwen3-8B", 36, 32, 8, 128),
    Model("Llama-3-8B", 32, 32, 8, 128),
    Model("SmolLM2-135M", 30, 9, 3, 64),
)
PARTIAL = Model("GLM-4.5", 92, 96, 8, 128, 64)
"""RoPE turns half of each head."""


def machine() -> dict[str, str | int]:
    """The machine that figures were measured on."""
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


def program() -> str:
    """How this process was started: `python -m benchmarks.NAME`, or the name of a script."""
    spec = sys.modules["__main__"].__spec__
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name


def report(rows: list[dict], path: str | None, quick: bool) -> None:
    """Prints `rows`, one table per run of equal keys, and writes them to `path` with what produced them."""
    for header, table in itertools.groupby(rows, key=lambda row: tuple(row)):
        print_table(header, [list(row.values()) for row in table])
    write({"rows": rows}, path, quick)


def write(results: dict, path: str | None, quick: bool) -> None:
    """Writes `results` to `path`, if given, with what produced them."""
    if path:
        content = {
            "command": " ".join([program(), *sys.argv[1:]]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": quick,
            "machine": machine(),
            "versions": versions(),
            **results,
        }
        Path(path).write_text(json.dumps(content, indent=2) + "\n")


def print_table(header: Sequence[str], rows: list[list]) -> None:
    text = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [header, *text]) for i in range(len(header))]
    for line in [header, *text]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()
