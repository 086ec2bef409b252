"""Draw the committed figures: each JSON in results/ becomes a PNG.

python benchmarks/plot.py
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot

RESULTS = Path(__file__).parent / "results"


def bars(axes, labels: list[str], values: list[float], line: float | None = None) -> None:
    """Horizontal bars with their values, the first on top, and a dashed line to compare with."""
    axes.barh(labels, values, color="#4477aa")
    axes.invert_yaxis()
    axes.margins(x=0.12)
    for index, value in enumerate(values):
        axes.text(value, index, f" {value:.3g}", va="center", fontsize=8)
    if line is not None:
        axes.axvline(line, color="black", linestyle="--", linewidth=1)


def draw_traffic(content: dict, path: Path) -> None:
    rows = [row for row in content["rows"] if row["selection"] == "union"]
    figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(rows) + 1.5), layout="constrained")
    bars(axes, [row["shape"] for row in rows], [row["ratio_to_minimum"] for row in rows], 1.0)
    axes.set_xlim(0.9)
    axes.set_xlabel("bytes moved / fewest possible, selection union (counted, not measured)")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_speed(content: dict, path: Path) -> None:
    rows, machine = content["rows"], content["machine"]
    labels = [row["shape"] for row in rows]
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 0.35 * len(rows) + 1.8), sharey=True, layout="constrained"
    )
    bars(left, labels, [row["speedup_over_rival"] for row in rows])
    left.set_xlabel("times as fast as the plain version")
    bars(right, labels, [row["share_of_copy_bandwidth"] for row in rows])
    right.invert_yaxis()
    right.set_xlabel("share of a copy's bandwidth")
    gpu = f"GPU {machine['gpu']}" if machine["gpu"] != "none" else "no GPU"
    figure.suptitle(f"{machine['cpu']}, {machine['torch_threads']} threads, {gpu}", fontsize=9)
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_compact(content: dict, path: Path) -> None:
    moves = [row for row in content["rows"] if "bytes_moved" in row]
    freed = [row for row in content["rows"] if "freed_share" in row]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 0.3 * len(moves) + 1.5), layout="constrained")
    labels = [f"{row['shape'].split()[0]} {row['selection']} {row['strategy']}" for row in moves]
    bars(left, labels, [row["bytes_moved"] / 1e6 for row in moves])
    left.set_xlabel("MB read and written in a round of 8 requests (counted)")
    bars(right, [f"page {row['page_size']} {row['strategy']}" for row in freed], [row["freed_share"] for row in freed])
    right.set_xlabel("freed slots / evicted tokens, 90 % evicted")
    figure.savefig(path, dpi=120, metadata={"Software": None})


def draw_capacity(content: dict, path: Path) -> None:
    figure, axes = pyplot.subplots(2, 1, figsize=(9, 5), sharex=True, layout="constrained")
    for name, color in (("plain", "#cc6677"), ("compressed", "#4477aa")):
        seconds, running, used = zip(*content[name]["timeline"], strict=True)
        axes[0].plot(seconds, running, color=color, label=name)
        axes[1].plot(seconds, used, color=color, label=name)
    axes[0].set_ylabel("running requests")
    axes[0].legend()
    axes[1].set_ylabel("KV slots in use")
    axes[1].axhline(content["setting"]["pool"], color="black", linestyle="--", linewidth=1)
    axes[1].set_xlabel("seconds")
    machine, setting = content["machine"], content["setting"]
    figure.suptitle(
        f"{setting['model']}, {setting['requests']} requests of {setting['tokens']} tokens, {machine['cpu']}"
    )
    figure.savefig(path, dpi=120, metadata={"Software": None})


DRAWN = {"score_traffic": draw_traffic, "score_speed": draw_speed, "compact": draw_compact, "capacity": draw_capacity}


def main() -> None:
    for name, draw in DRAWN.items():
        # Also those of a GPU, which have its name in theirs.
        for path in sorted(RESULTS.glob(f"{name}*.json")):
            draw(json.loads(path.read_text()), path.with_suffix(".png"))
            print(path.with_suffix(".png"))


if __name__ == "__main__":
    main()
